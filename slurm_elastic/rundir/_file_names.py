"""File names in a run directory."""

from __future__ import annotations

import re

from slurm_elastic.errors import UsageError

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NUMBERED = re.compile(r"([0-9]{6,})\.json")


def is_safe(name: str) -> bool:
    """Return True if a name is a safe file name."""
    return _SAFE_NAME.fullmatch(name) is not None


def safe(kind: str, name: str) -> str:
    """Return a name unchanged if it is a safe file name.

    Args:
        kind: The kind of thing that has the name, for the message.
        name: The name.

    Raises:
        UsageError: The name is no safe file name.
    """
    if not is_safe(name):
        raise UsageError(
            f"{kind} {name[:140]!r} is no safe file name; use at most 128 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit"
        )
    return name


def numbered(number: int) -> str:
    """Return the file name of a round or a term."""
    if number < 0:
        raise ValueError(f"numbers start at 0: {number}")
    return f"{number:06d}.json"


def descending_numbers(names: list[str]) -> list[int]:
    """Return the numbers in those file names that `numbered` has made, the highest first."""
    return sorted((int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))), reverse=True)
