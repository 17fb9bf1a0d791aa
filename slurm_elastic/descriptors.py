"""The file descriptors of a process: its standard streams, and how many others connections of agents may take.

Slurm passes on the limits of the shell that submitted the job (PropagateResourceLimits, slurm.conf(5)), in which the
soft one is 1,024 as a rule. An agent raises it to the hard one (getrlimit(2)); workers keep what they were given.
"""

from __future__ import annotations

import os
import resource
import sys

from slurm_elastic.errors import UsageError

STRANGERS = 128
"""Connections of strangers for which there is always room."""
_LEAST = 128
"""Descriptors without which an agent does not come to lead: about 60 are its own, without workers."""
_RESERVE = 256
"""Descriptors of a leader beside connections: records, logs, pipes to workers, questions to Slurm."""

_given: tuple[int, int] | None = None


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed, before another file gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The kernel gives the lowest number that is free (open(2)).
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            # As Python opens them: a stream that another one replaces leaves its number open.
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def raise_limit() -> None:
    """Raise the soft limit of this process to the hard one."""
    global _given
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _given = _given or (soft, hard)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def given_limit() -> tuple[int, int]:
    """Return the soft and the hard limit that this process was started with, which its workers get."""
    return _given or resource.getrlimit(resource.RLIMIT_NOFILE)


def needed(agents: int) -> int:
    """Return the number of descriptors that the leader of a number of agents needs."""
    return agents + STRANGERS + _RESERVE


def connections_at_most(limit: int | None = None) -> int:
    """Return the number of agents whose connections have room; half of the descriptors where these are very few."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return max(limit - STRANGERS - _RESERVE, limit // 2)


def require(agents: int) -> None:
    """Raise UsageError if the hard limit is too low for a leader of this number of agents."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if agents > connections_at_most(limit) or limit < _LEAST:
        raise UsageError(
            f"the limit on open files is {limit} here (ulimit -Hn), and an agent that leads {agents} agents needs "
            f"{needed(agents)}; raise the hard limit of the shell that submits the job, or of slurmd (LimitNOFILE), "
            "or take fewer nodes"
        )
