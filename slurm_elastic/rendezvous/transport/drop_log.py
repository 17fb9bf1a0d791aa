"""The records dropped from connections, counted and logged within bounds, however many strangers send."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from slurm_elastic.text import printable

__all__ = ["OTHERS", "DropLog"]

_ADDRESSES = 256
"""Addresses that are counted by themselves."""
OTHERS = "other addresses"
_LINES = 4
"""Lines a minute."""
_MINUTE = 60.0


class DropLog:
    """Counts by address, and logs a few lines a minute; the first of the next minute says how many were left out.

    Attributes:
        counts: how many were dropped, by address; those of further addresses together under `OTHERS`.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._logger, self._clock = logger, clock
        self._minute, self._lines, self._left_out = -_MINUTE, 0, 0
        self._said: set[tuple[str, str]] = set()

    def add(self, peer: str, why: str) -> None:
        """Count one; log it if this address was not heard of, and there is room for a line."""
        known = peer in self.counts
        if not known and len(self.counts) >= _ADDRESSES:
            peer = OTHERS
            known = peer in self.counts
        self.counts[peer] += 1
        if known:
            return
        now = self._clock()
        if now >= self._minute + _MINUTE:
            self._minute, self._lines = now, 0
        if self._lines >= _LINES:
            self._left_out += 1
            return
        self._lines += 1
        more = f"; {self._left_out} more addresses since the last line" if self._left_out else ""
        self._left_out = 0
        self._logger.warning("dropped %s from %s (logged once%s)", printable(why), printable(peer), more)
