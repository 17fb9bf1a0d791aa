"""The life cycle of one agent as a pure state machine: no I/O, no clock, no torch."""
