"""What an agent's main thread is told by its link to the leader."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.leave_requests import LeaveRequested
from slurm_elastic.rendezvous.transport.messages import Ended, Holding, Interrupted, Placed, Stopping, Waiting

__all__ = ["CutOff", "LeaderLost", "RecordsLost", "Unreachable", "Word"]


@dataclass(frozen=True, slots=True)
class CutOff(Interrupted):
    """Said by the link itself: the leader is not heard any more and gives this agent up about now.

    Others may train soon without it, so its workers end, and publish nothing.
    """


@dataclass(frozen=True, slots=True)
class LeaderLost:
    """The leader is gone; until somebody takes over, this run cannot change its membership."""

    why: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No leader of this run was found, or it cannot be spoken with. `usage` if a person has to mend something."""

    why: str
    usage: bool = False


@dataclass(frozen=True, slots=True)
class RecordsLost:
    """The store of the run's records is lost for good, so nothing can change any more."""

    why: str


Word = Placed | Holding | Stopping | Interrupted | CutOff | LeaveRequested | Waiting | Ended | LeaderLost | Unreachable
