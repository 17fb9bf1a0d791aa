"""Waiting for descriptors by poll(2): select(2) refuses those from 1024 on, which the leader of many agents has."""

from __future__ import annotations

import select
from collections.abc import Iterable


def wait_on(descriptors: Iterable[int], seconds: float | None) -> set[int]:
    """Wait until a descriptor is readable, up to `seconds` (None: without limit); return the readable ones.

    A pidfd is readable when its process has ended.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    ready = waiting.poll(None if seconds is None else max(0.0, seconds) * 1000)
    return {descriptor for descriptor, _events in ready}
