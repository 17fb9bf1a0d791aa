"""The actions of the election machine, which :mod:`.runner` carries out."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.election.campaign import Campaign
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.leader_events import CutOff, LeaderEvent
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import AgentMessage


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect, and prove to each other whose the run is. Answered by LinkOpened or LinkFailed.

    Attributes:
        number: of the attempt.
        endpoint: where a leader may be.
        timeout: seconds that it may take; None for the transport's own limits.
    """

    number: int
    endpoint: Endpoint
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class CancelConnect:
    """Give up an attempt to connect. It is not answered, unless the answer is under way."""

    number: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """End a link at once."""

    number: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the leader."""

    number: int
    message: AgentMessage


@dataclass(frozen=True, slots=True)
class AnswerProbe:
    """Answer a probe of the leader with how far the workers here are.

    Attributes:
        number: Number of the link.
        probe: Number of the probe.
        dumps: True if the workers have to write their dumps.
    """

    number: int
    probe: int
    dumps: bool = False


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver an event to the main thread of the agent."""

    event: LeaderEvent


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers here: the leader gives this agent up about now, and goes on without it."""

    event: CutOff


@dataclass(frozen=True, slots=True)
class ReadLeaderLocation:
    """Read from the records where the leader is. Answered by LeaderLocationRead.

    Attributes:
        number: Number of the reading.
        known: The newest round whose record need not be read.
    """

    number: int
    known: LeaderLocation


@dataclass(frozen=True, slots=True)
class ReadCampaignRecords:
    """Read from the records what a candidate needs. Answered by CampaignRecordsRead or CampaignRecordsFailed."""

    number: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Accept joins, and claim the term once there is a quorum. Reported by TermClaimed, LeaderEnded."""

    number: int
    campaign: Campaign


@dataclass(frozen=True, slots=True)
class StopLeading:
    """Accept no more joins, and end all connections of agents to this one. Not reported."""

    number: int


@dataclass(frozen=True, slots=True)
class Warn:
    """Log a line that a person should see."""

    line: str


Action = (
    Connect
    | CancelConnect
    | CloseLink
    | Send
    | AnswerProbe
    | Deliver
    | StopWorkers
    | ReadLeaderLocation
    | ReadCampaignRecords
    | Lead
    | StopLeading
    | Warn
)
