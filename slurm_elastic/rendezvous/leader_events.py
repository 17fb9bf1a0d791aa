"""The events of the run that an agent's main thread receives from the election."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership import Interrupted, MembershipMessage
from slurm_elastic.rendezvous.requests import LeaveRequested
from slurm_elastic.rendezvous.transport.messages import Assignment


@dataclass(frozen=True, slots=True)
class CutOff(Interrupted):
    """Raised by the agent itself: the leader is silent, and gives this agent up about now.

    Others may train soon without it, so its workers end, and publish nothing.
    """


@dataclass(frozen=True, slots=True)
class LeaderLost:
    """The leader is gone; until another agent leads, this run cannot change its membership."""

    why: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No leader of this run was found, or it cannot be spoken with. `usage` if a person has to fix something."""

    why: str
    usage: bool = False


@dataclass(frozen=True, slots=True)
class RecordsLost:
    """The store of the run's records is lost for good, so nothing can change any more."""

    why: str


LeaderEvent = Assignment | MembershipMessage | LeaveRequested | CutOff | LeaderLost | Unreachable
