"""Decides who is in the next round: a pure state machine, without I/O, clock or threads.

:func:`.machine.step` takes the state, one event and the leader's monotonic time, and returns the next state and what
has to be done. Everything that the leader decides is decided here; everything that it does is done elsewhere.
"""
