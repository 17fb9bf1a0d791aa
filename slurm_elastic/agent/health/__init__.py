"""The health port of a node: HTTP pages with the state of the agent.

It extends torch's HealthCheckServer, which is an empty stub in torch 2.13, starts before the first rendezvous and stops
after everything else. A thread of its own answers. The agent replaces one immutable value at each change, and the pages
are pure functions of that value. Without requests nothing runs.
"""
