"""The events of the election machine: what happens to one agent's part in the election."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.election.campaign import CampaignRecords
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.membership import AgentInfo, LeaveReason, WorkerFailure
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import AgentMessage, LeaderMessage


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the moment that :attr:`Election.deadline` names has come."""


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A connection was made, and both sides have proved that they belong to the run.

    Attributes:
        number: of the attempt; from now on that of the link.
        endpoint: of the other side, by address.
        term: in which the other side leads, or would.
    """

    number: int
    endpoint: Endpoint
    term: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """An attempt to connect has failed.

    Attributes:
        number: of the attempt.
        answer: what that says about the other side.
        problem: one line about it.
        busy: seconds after which the other side has asked to try again.
    """

    number: int
    answer: Answer
    problem: str
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """A link has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Received:
    """A leader has sent a message."""

    number: int
    message: LeaderMessage


@dataclass(frozen=True, slots=True)
class LeaderLocationRead:
    """The records have been read for the location of the leader."""

    number: int
    location: LeaderLocation


@dataclass(frozen=True, slots=True)
class CampaignRecordsRead:
    """The records that a candidate needs have been read."""

    number: int
    records: CampaignRecords


@dataclass(frozen=True, slots=True)
class CampaignRecordsFailed:
    """The records that a candidate needs could not be read."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class TermClaimed:
    """The leader here has claimed its term, confirmed the last round and published its endpoint."""

    number: int


@dataclass(frozen=True, slots=True)
class CampaignBlocked:
    """The candidate here keeps members of the last round from each other, or does so no more; see
    :func:`~slurm_elastic.rendezvous.membership.blocks_election`."""

    number: int
    blocks: bool


@dataclass(frozen=True, slots=True)
class LeaderEnded:
    """The leader here leads no more.

    Attributes:
        number: of the campaign.
        problem: one line, if a person has to fix something; empty if another agent leads or this one has resigned.
    """

    number: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """The agent has no workers and wants an assignment."""

    candidate: AgentInfo


@dataclass(frozen=True, slots=True)
class AnnounceLeave:
    """The agent leaves, within `seconds` if that is known; its workers may run on until then."""

    reason: LeaveReason
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SendToLeader:
    """The agent has a message for the leader. It is dropped if there is none: a leader that needs it will ask again."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Depart:
    """The agent leaves now. Its workers have stopped, at the stop step if `stopped`."""

    reason: LeaveReason
    stopped: bool


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """A worker of the current round failed while the agent was not stopping it."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """All workers of the current round ended with exit code 0."""


@dataclass(frozen=True, slots=True)
class CloseRun:
    """The rendezvous ends for all agents."""


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """No worker runs here any more. For an agent whose next message is Joined or Left in any case."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent ends: it searches and campaigns no more."""


Event = (
    Tick
    | LinkOpened
    | LinkFailed
    | LinkClosed
    | Received
    | LeaderLocationRead
    | CampaignRecordsRead
    | CampaignRecordsFailed
    | TermClaimed
    | CampaignBlocked
    | LeaderEnded
    | Join
    | AnnounceLeave
    | SendToLeader
    | Depart
    | ReportFailure
    | ReportFinished
    | CloseRun
    | WorkersStopped
    | Stop
)
