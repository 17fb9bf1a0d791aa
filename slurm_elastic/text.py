"""Text from others, made fit for a terminal and for one line of a log, and sizes as text."""

from __future__ import annotations

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
