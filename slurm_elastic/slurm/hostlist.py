"""Slurm's host list expressions, such as ``rack[1-2]n[01-04],gpu7``.

python-hostlist does the expansion. Differences to Slurm's own parser (``scontrol show hostnames``, seen with 22.05):

- Slurm keeps duplicates and order; this module asks python-hostlist for the same.
- Slurm separates names by commas, blanks, tabs or newlines; this module splits them.
- Slurm allows 65536 names in one range (MAX_RANGE in its hostlist.c); this module allows as many in the whole list.
- Slurm refuses text after the last bracket (``n[1-3]-ib``); this module accepts it, since it has one meaning only.
- Slurm accepts ``n[1-]`` and a missing last bracket; this module refuses both, since Slurm never writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import hostlist

from slurm_elastic.errors import UsageError
from slurm_elastic.text import printable

MAX_RANGE = 65536
"""Maximum number of names in a host list."""

_ERRORS = (hostlist.BadHostlist, ValueError, AttributeError, RecursionError)
"""The last three for numbers of thousands of digits, and for names with a line break (python-hostlist 2.3)."""


def expand(text: str) -> tuple[str, ...]:
    """Return the names in a host list, in its order and with its duplicates.

    Raises:
        UsageError: The list is empty, malformed, or stands for more than `MAX_RANGE` names.
    """
    names: list[str] = []
    shown = printable(text, 120)
    # Split at the separators outside of brackets.
    for part in filter(None, re.split(r"[,\s]+(?![^\[]*\])", text)):
        try:
            # Refuses a part that stands for more than 100,000 names before it makes them.
            names.extend(hostlist.expand_hostlist(part, allow_duplicates=True))
        except _ERRORS as error:
            raise UsageError(f"malformed host list {shown!r}: {error}; write it as in n[1-3,7] or n1,n2") from None
        if len(names) > MAX_RANGE:
            raise UsageError(f"host list {shown!r} stands for more than {MAX_RANGE} nodes; name fewer")
    if not names:
        raise UsageError("the host list is empty; write it as in n[1-3,7] or n1,n2")
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """Return a short, sorted host list of names, each once; names with commas if one cannot be in such a list."""
    names = list(names)
    try:
        return str(hostlist.collect_hostlist(names))
    except _ERRORS:
        return ",".join(names)


def natural_key(name: str) -> tuple[tuple[tuple[int, str], ...], str]:
    """Return a sort key that puts node2 before node10.

    For names that differ only in padding, their text decides.
    """
    parts = re.split(r"([0-9]+)", name)
    # A number as its length and its digits: int() refuses thousands of them.
    numbers = (part.lstrip("0") for part in parts)
    return tuple((len(n), n) if place % 2 else (0, parts[place]) for place, n in enumerate(numbers)), name
