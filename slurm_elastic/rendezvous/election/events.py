"""The events and actions of the election machine, and what the agent's main thread hears from it. Data only.

:mod:`.runner` carries out the actions. `number` is that of an attempt to connect, and then of the link; of a reading of
the records; or of a campaign.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.election.campaign import Campaign, CampaignRecords
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.membership.agents import AgentInfo
from slurm_elastic.rendezvous.membership.events import Interrupted, MembershipMessage
from slurm_elastic.rendezvous.transport import messages


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the moment that :attr:`Election.deadline` names has come."""


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A connection was made, and both sides have proved that they belong to the run.

    `endpoint` has the address of the other side, and `term` is the one in which that leads, or would.
    """

    number: int
    endpoint: messages.Endpoint
    term: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """An attempt to connect has failed.

    Attributes:
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
    message: messages.LeaderMessage


@dataclass(frozen=True, slots=True)
class LeaderLocationRead:
    """The records have been read for the location of the leader."""

    number: int
    location: LeaderLocation


@dataclass(frozen=True, slots=True)
class CampaignRecordsRead:
    """The records that a candidate needs have been read; None if they could not be, for this reason."""

    number: int
    records: CampaignRecords | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LeaderClaimed:
    """The candidate here has claimed its term: it leads."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaderEnded:
    """The leader or candidate here has stepped down. `problem` is one line if a person has to fix something."""

    number: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """The agent has no workers and wants an assignment."""

    candidate: AgentInfo


@dataclass(frozen=True, slots=True)
class SendToLeader:
    """The agent has a message for the leader.

    Without a leader it is dropped, but for what each new leader is told; see :meth:`.Follower.told`.
    """

    message: messages.AgentMessage


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent ends: it searches and campaigns no more."""


RecordsEvent = LeaderLocationRead | CampaignRecordsRead
CampaignEvent = LeaderClaimed | LeaderEnded
LinkEvent = LinkOpened | LinkFailed | LinkClosed | Received
Event = Tick | LinkEvent | RecordsEvent | CampaignEvent | Join | SendToLeader | Stop


# What the main thread hears.


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


LeaderEvent = messages.Assignment | MembershipMessage | messages.LeaveRequested | CutOff | LeaderLost | Unreachable


# Actions.


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect, and prove to each other whose the run is. Answered by LinkOpened or LinkFailed.

    It may take `timeout` seconds; None for the transport's own limits.
    """

    number: int
    endpoint: messages.Endpoint
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class CloseLink:
    """End a link, or an attempt to connect, at once. The attempt is not answered, unless that is under way already."""

    number: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the leader."""

    number: int
    message: messages.AgentMessage


@dataclass(frozen=True, slots=True)
class AnswerProbe:
    """Answer the probe of this number with how far the workers here are; with `dumps`, these write their dumps."""

    number: int
    probe: int
    dumps: bool = False


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver an event to the main thread of the agent."""

    event: LeaderEvent


@dataclass(frozen=True, slots=True)
class ReadLeaderLocation:
    """Read from the records where the leader is, but no record of a known round. Answered by LeaderLocationRead."""

    number: int
    known: LeaderLocation


@dataclass(frozen=True, slots=True)
class ReadCampaignRecords:
    """Read from the records what a candidate needs. Answered by CampaignRecordsRead."""

    number: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Accept joins, and claim the term once there is a quorum. Reported by LeaderClaimed, LeaderEnded."""

    number: int
    campaign: Campaign


@dataclass(frozen=True, slots=True)
class StopLeading:
    """Accept no more joins, and end all connections of agents to this one. Not reported."""


@dataclass(frozen=True, slots=True)
class Warn:
    """Log a line that a person should see."""

    line: str


LinkAction = Connect | CloseLink | Send | AnswerProbe
Action = LinkAction | Deliver | ReadLeaderLocation | ReadCampaignRecords | Lead | StopLeading | Warn
