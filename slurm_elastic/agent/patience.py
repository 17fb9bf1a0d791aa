"""What the command line says about signals and requeues; without torch, as the batch script's verdict needs it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import Meaning

__all__ = ["Patience", "patience"]

_MAX_REQUEUES = 10


@dataclass(frozen=True, slots=True)
class Patience:
    """How a job deals with its end.

    Attributes:
        max_requeues: how often it is requeued because of its time limit.
        meaning: of signals, where Slurm does not tell.
    """

    max_requeues: int = _MAX_REQUEUES
    meaning: Meaning = field(default_factory=Meaning)


def patience(max_requeues: str | None, grace: str | None, warning: str | None) -> Patience:
    """Read the options ``--max-requeues``, ``--grace`` and ``--warning``; None for those that were not given.

    Raises:
        UsageError: a value is no number, or negative.
    """
    default = Meaning()
    return Patience(
        max_requeues=_count("--max-requeues", max_requeues, _MAX_REQUEUES),
        meaning=Meaning(_seconds("--grace", grace, default.grace), _seconds("--warning", warning, default.warning)),
    )


def _count(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{option} {text!r} is no number; give 0 or more")
    return int(text)


def _seconds(option: str, text: str | None, default: float) -> float:
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(f"{option} {text!r} is no number of seconds; give 0 or more")
    return seconds
