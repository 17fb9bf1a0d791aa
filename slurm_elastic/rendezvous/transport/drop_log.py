"""Bounded logs of what was dropped from connections, and of faults, however many strangers connect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from slurm_elastic.text import printable

_ADDRESSES = 256
"""Addresses with a count of their own."""
OTHERS = "other addresses"
_LINES = 4
"""Lines per minute."""
_MINUTE = 60.0


class DropLog:
    """Counts drops by address, and logs the first of each address, at most 4 lines per minute.

    The first line of the next minute names the number of addresses that were left out.

    Args:
        logger: Gets the lines.
        clock: Returns the time in seconds.

    Attributes:
        counts: Number of drops by address; those of all further addresses under `OTHERS`.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._logger, self._clock = logger, clock
        self._minute, self._lines, self._left_out = -_MINUTE, 0, 0

    def add(self, peer: str, why: str) -> None:
        """Count a drop, and log it if it is the first of its address and this minute has room for a line.

        Args:
            peer: Address of the other end.
            why: What was dropped, as in "a frame with a wrong code".
        """
        is_counted = peer in self.counts
        if not is_counted and len(self.counts) >= _ADDRESSES:
            peer = OTHERS
            is_counted = peer in self.counts
        self.counts[peer] += 1
        if is_counted:
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


class FaultLog:
    """Logs exceptions that no caller takes, as the exception handler of a loop: one traceback per minute.

    Each line names the number of those that were left out since the last one.

    Args:
        logger: Gets the lines.
        clock: Returns the time in seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._minute, self._left_out = -_MINUTE, 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """See asyncio.loop.set_exception_handler."""
        now = self._clock()
        if now < self._minute + _MINUTE:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last line)" if self._left_out else ""
        self._minute, self._left_out = now, 0
        self._logger.error("%s%s", printable(context["message"]), more, exc_info=context.get("exception"))
