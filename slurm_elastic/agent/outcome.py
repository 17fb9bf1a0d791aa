"""What an agent ends with."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.membership import WorkerFailure

__all__ = ["AgentOutcome"]


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """How this agent ended.

    Attributes:
        exit_code: for Slurm.
        failure: the run's root cause, if it failed.
        detail: one line, if there is something to say.
        gave_up: whether it ends alone, and others may go on: it found no leader or no records, or its workers live on.
    """

    exit_code: ExitCode
    failure: WorkerFailure | None = None
    detail: str = ""
    gave_up: bool = False
