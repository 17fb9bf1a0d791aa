"""Times on the clock: those that records of others name, and those that a person reads."""

from __future__ import annotations

import datetime

_FIRST, _LAST = 0.0, 253370764800.0
"""From 1970 to 9998: a clock shows these in every zone."""


def parse_time(text: object) -> float | None:
    """Return a time of a record in seconds since 1970; None if it is none that clocks show."""
    try:
        # Python 3.10 does not read the Z that other programs write for UTC.
        when = datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) if isinstance(text, str) else None
    except ValueError:
        return None
    seconds = None if when is None or when.tzinfo is None else when.timestamp()
    return seconds if seconds is not None and _FIRST <= seconds < _LAST else None


def local_time(seconds: float) -> datetime.datetime:
    """Return a time in the zone of this machine; the nearest that clocks show where it is foreign, as a file's."""
    return datetime.datetime.fromtimestamp(min(_LAST, max(_FIRST, seconds))).astimezone()
