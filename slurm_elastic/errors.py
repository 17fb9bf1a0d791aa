"""Errors and exit codes for users and Slurm."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """Exit codes of an agent.

    75 is EX_TEMPFAIL of sysexits.h; 76 is ours.
    """

    FINISHED = 0
    """The run is finished, also for a spare."""
    FAILED = 1
    """The workers failed for good; the leader has printed the root cause."""
    USAGE = 2
    """Wrong usage or configuration; nothing was started."""
    LEFT = 75
    """The agent left on notice; the run is not finished, and this node may come back."""
    FENCED = 76
    """A newer term of this run exists."""


class SlurmElasticError(Exception):
    """Base class of all errors that end the program with one line instead of a traceback."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(SlurmElasticError, ValueError):
    """A mistake of the user. The message is one line: what is wrong; how to fix it.

    For a wrong value torch and submitit raise a ValueError.
    """

    exit_code = ExitCode.USAGE


class RecordsError(SlurmElasticError):
    """The records of a run cannot be read or written: run directory or etcd is full, gone, or holds something else.

    A person has to fix it; the message is one line that says what and how. A write may have been carried out or not.
    """


def did_you_mean(word: str, names: Iterable[str], otherwise: str) -> str:
    """Return how to fix a misspelt word: the known word that is near to it, else `otherwise`."""
    import difflib

    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else otherwise
