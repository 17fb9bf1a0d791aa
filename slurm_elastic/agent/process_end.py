"""Holds what an agent does when its exit functions have run: those of torch take a tenth of a second."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

_last: list[Callable[[], object]] = []


def at_process_end(function: Callable[[], object]) -> None:
    """Have a function called by `run_last`."""
    _last.append(function)


def run_last() -> None:
    """Call the functions, once; the process ends when this returns. It drops errors: the logs are closed by then."""
    while _last:
        with contextlib.suppress(Exception):
            _last.pop()()
