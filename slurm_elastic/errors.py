"""Errors and exit codes that a person or Slurm sees."""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["ExitCode", "SlurmElasticError", "UsageError", "did_you_mean"]


class ExitCode(enum.IntEnum):
    """What an agent's exit code tells Slurm.

    75 is EX_TEMPFAIL of sysexits.h; 76 is ours.
    """

    FINISHED = 0
    """The run is finished, also for a spare."""
    FAILED = 1
    """The workers failed for good; the root cause was printed last."""
    USAGE = 2
    """Wrong usage or configuration; nothing was started."""
    LEFT = 75
    """Left on notice; the run is not finished and this node may come back."""
    FENCED = 76
    """A newer epoch of this run exists."""


class SlurmElasticError(Exception):
    """Base of all errors that end the program with one line instead of a traceback."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(SlurmElasticError):
    """A person's mistake. The message is one line: what is wrong, then how to mend it."""

    exit_code = ExitCode.USAGE


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """How to mend a misspelt word: by the known one that comes near it; where none does, as `otherwise` says."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else otherwise
