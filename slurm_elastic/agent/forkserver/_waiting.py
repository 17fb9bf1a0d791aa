"""Waiting for descriptors. Not by select(2): a leader of a thousand agents has descriptors beyond its limit."""

from __future__ import annotations

import select
from collections.abc import Iterable

__all__ = ["wait_on"]


def wait_on(descriptors: Iterable[int], seconds: float | None) -> set[int]:
    """Wait until one can be read, at most so many seconds, None for ever; return those that can.

    A pidfd can when its process has ended.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    ready = waiting.poll(None if seconds is None else max(0.0, seconds) * 1000)
    return {descriptor for descriptor, _events in ready}
