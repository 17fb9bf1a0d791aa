"""Text and times from others, made fit for a terminal and for one line of a log; numbers as text."""

from __future__ import annotations

import datetime
import re

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0, C1), line separators, marks that turn the direction of writing, lone surrogates."""


def printable(text: object, most: int = 300) -> str:
    """Return text of foreign origin as one line, with each unfit character as a question mark, cut to `most`."""
    fit = _UNFIT.sub("?", str(text))
    return fit if len(fit) <= most else f"{fit[:most]}..."


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit of which it has one."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 node" and "1,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Return a time in the unit that a person would say it in."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


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
