"""The watchdog of a node: finds workers whose timers expired, records their stacks, and kills them, and no others.

It implements the protocol of torch's file timer (torch 2.13, distributed/elastic/timer/file_based_local_timer.py), so
a script uses torch's own client. torch's server is not used: it removes any file at its path, leaks a thread at every
restart, waits for ever in open() and readline(), accepts any process id, and kills its own agent with the worker.
"""
