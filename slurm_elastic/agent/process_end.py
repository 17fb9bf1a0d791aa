"""Holds what an agent does when its exit functions have run: those of torch take a tenth of a second."""

from __future__ import annotations

import contextlib

_last = contextlib.ExitStack()

at_process_end = _last.callback
"""Have a function called by `run_last`; that which comes last is called first."""


def run_last() -> None:
    """Call the functions, once; the process ends when this returns. It drops errors: the logs are closed by then."""
    with contextlib.suppress(Exception):
        _last.close()
