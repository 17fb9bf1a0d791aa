"""The election as seen by one agent: a pure state machine, without I/O, clock, threads or randomness.

:func:`step` takes the state, one event and the agent's monotonic time, and returns the next state and the actions to be
carried out. The agent follows a leader, searches for one, or campaigns to be the next one; while it campaigns or leads
it follows itself. Everything that it decides is decided here; :mod:`.runner` carries the actions out.

The order in which a leader claims its term, confirms the last round and publishes is decided in :mod:`.term`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.rendezvous.election import attempts as attempting
from slurm_elastic.rendezvous.election import campaign as campaigning
from slurm_elastic.rendezvous.election.attempts import Answer, Attempts
from slurm_elastic.rendezvous.election.campaign import Campaign, CampaignConfig, CampaignRecords
from slurm_elastic.rendezvous.election.follower import Participant
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation, Leadership
from slurm_elastic.rendezvous.election.policy import (
    BLOCKING_LIMIT,
    FENCE,
    LeaderLoss,
    Successor,
    campaign_delay,
    default_leader_limit,
)
from slurm_elastic.rendezvous.leader_events import CutOff, LeaderEvent, LeaderLost, Unreachable
from slurm_elastic.rendezvous.leave_requests import LeaveRequest, LeaveRequested
from slurm_elastic.rendezvous.membership import AgentInfo, LeaveReason, Reason, WorkerFailure, replace
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import (
    AgentMessage,
    Assignment,
    Beat,
    Ended,
    Holding,
    Interrupted,
    LeaderMessage,
    Probed,
    Resigned,
    Stopping,
    Waiting,
)

__all__ = [
    "Action",
    "AnnounceLeave",
    "AnswerProbe",
    "CampaignBlocked",
    "CampaignFailed",
    "CampaignRecordsSeen",
    "CancelConnect",
    "CloseLink",
    "CloseRun",
    "Connect",
    "Deliver",
    "Depart",
    "Election",
    "ElectionConfig",
    "Event",
    "Join",
    "Lead",
    "LeaderEnded",
    "LinkClosed",
    "LinkFailed",
    "LinkOpened",
    "LocationSeen",
    "LookForCampaign",
    "LookForLeader",
    "Received",
    "ReportFailure",
    "ReportFinished",
    "ReportStep",
    "RequestLeave",
    "Role",
    "Send",
    "Stop",
    "StopLeading",
    "StopWorkers",
    "TermClaimed",
    "Tick",
    "Warn",
    "initial_election",
    "step",
]

FIRST_TRIED = 8
"""Agents that may follow the leader and are tried at once."""
READ_AGAIN = 0.5
"""Seconds between two looks at the records while the agent searches or campaigns."""
RESTORE = 0.1
"""Seconds in which a broken link may be restored before workers are stopped; as long as a leader waits for it."""
CAMPAIGN_AGAIN = 1.0
"""Seconds between the starts of two campaigns."""
STEP_DOWN = 3.0
"""Seconds in which an agent does not campaign again after it stepped down: the time to reach the other candidate."""
UNLED = 10.0
"""Seconds after which a run that no agent has ever led is led by any agent."""
LATE = 1 / 6
"""Of the heartbeat limit: an agent that looks at its clock so much later than it meant to was paused."""
SUSPICIOUS = 1 / 2
"""Of the heartbeat limit: after so much silence of its leader an agent connects to it anew."""
RECONNECT, RECONNECT_AGAIN = 1 / 10, 1 / 20
"""Of the heartbeat limit: how long such a connection may take, and the pause before the next one."""


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """The settings of the election, which stay the same while the agent runs. Times in seconds.

    Attributes:
        agent: this agent.
        endpoints: where this very agent listens; the first is the one that it uses itself.
        can_hold: whether workers here can be asked for a step to stop at.
        coming: whether this agent joins soon after it has found the leader.
        connect_timeout: how long the agent searches for a leader.
        heartbeat_limit: silence after which the leader gives up an agent, until a leader says what it goes by.
        leader_limit: silence after which the leader is lost, at least.
        campaign: what a candidate knows of the run; None for an agent that never leads.
    """

    agent: str
    endpoints: tuple[Endpoint, ...] = ()
    can_hold: bool = False
    coming: bool = False
    connect_timeout: float = 600.0
    heartbeat_limit: float = 3.0
    leader_limit: float = 4.25
    campaign: CampaignConfig | None = None


# What happens.


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
class LocationSeen:
    """A look at the records is through."""

    number: int
    location: LeaderLocation


@dataclass(frozen=True, slots=True)
class CampaignRecordsSeen:
    """The records that a candidate needs have been read."""

    number: int
    records: CampaignRecords


@dataclass(frozen=True, slots=True)
class CampaignFailed:
    """The records could not be read."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class TermClaimed:
    """The leader here has claimed its term, confirmed the last round and published its endpoint."""

    number: int


@dataclass(frozen=True, slots=True)
class CampaignBlocked:
    """The candidate here keeps members of the last round from each other, or does so no more; see
    :func:`~slurm_elastic.rendezvous.membership.in_the_way`."""

    number: int
    blocks: bool


@dataclass(frozen=True, slots=True)
class LeaderEnded:
    """The leader here leads no more.

    Attributes:
        number: of the campaign.
        problem: one line, if a person has to mend something; empty if another agent leads or this one has resigned.
    """

    number: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """The agent has no workers and wants an assignment."""

    candidate: AgentInfo


@dataclass(frozen=True, slots=True)
class AnnounceLeave:
    """The agent leaves, within so many seconds if that is known; its workers may run on for a while."""

    reason: LeaveReason
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ReportStep:
    """The workers of this round can stop at this step; None if they take no part in planned stops."""

    round: int
    step: int | None


@dataclass(frozen=True, slots=True)
class Depart:
    """The agent goes. Its workers have stopped, at the agreed step if `stopped`."""

    reason: LeaveReason
    stopped: bool


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """A worker of the round that runs here failed by itself."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """All workers of the round that runs here ended well."""


@dataclass(frozen=True, slots=True)
class RequestLeave:
    """All other agents of a job have to leave; see :class:`~slurm_elastic.rendezvous.leave_requests.LeaveRequest`."""

    job: str
    reason: LeaveReason
    seconds: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class CloseRun:
    """The rendezvous ends for all agents."""


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """No worker runs here any more. For an agent whose next message is a join or a farewell in any case."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent ends: it searches and campaigns no more."""


Event = (
    Tick
    | LinkOpened
    | LinkFailed
    | LinkClosed
    | Received
    | LocationSeen
    | CampaignRecordsSeen
    | CampaignFailed
    | TermClaimed
    | CampaignBlocked
    | LeaderEnded
    | Join
    | AnnounceLeave
    | ReportStep
    | Depart
    | ReportFailure
    | ReportFinished
    | RequestLeave
    | CloseRun
    | WorkersStopped
    | Stop
)


# What is to be done.


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
    """Answer a probe of the leader by how far the workers here are."""

    number: int
    probe: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tell the agent."""

    event: LeaderEvent


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers here: the leader gives this agent up about now, and goes on without it."""

    event: CutOff


@dataclass(frozen=True, slots=True)
class LookForLeader:
    """Look in the records where the leader is. Answered by LocationSeen."""

    number: int


@dataclass(frozen=True, slots=True)
class LookForCampaign:
    """Read from the records what a candidate has to know. Answered by CampaignRecordsSeen or CampaignFailed."""

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
    | LookForLeader
    | LookForCampaign
    | Lead
    | StopLeading
    | Warn
)


# The state.


class Role(enum.Enum):
    """The role of an agent in the election."""

    SEARCHING = "searching"
    FOLLOWING = "following"
    CAMPAIGNING = "campaigning"
    LEADING = "leading"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Following:
    """The link to the leader.

    Attributes:
        number: of the link.
        endpoint: of the leader.
        heard_at: when a message came over it last.
        forgiven: the value that `heard_at` was given when the agent itself was paused.
        reconnect: number of the attempt at a second link, while the leader is silent.
        reconnect_at: when the next such attempt starts.
        closed: whether it has ended while a second link is on its way, for which the leader ends the first.
    """

    number: int
    endpoint: Endpoint
    heard_at: float
    forgiven: float = -math.inf
    reconnect: int | None = None
    reconnect_at: float = -math.inf
    closed: bool = False


@dataclass(frozen=True)
class Search:
    """The search for a leader.

    Attributes:
        began: when it began.
        lost: where the leader was whose link is of no more use; None for the first search.
        heard_at: when that leader was heard last.
        lost_at: since when it is certain that there is no leader where there was one; None as long as it is not.
        attempts: at the endpoints where one may be.
    """

    began: float
    lost: Endpoint | None = None
    heard_at: float = -math.inf
    lost_at: float | None = None
    attempts: Attempts = field(default_factory=Attempts)


@dataclass(frozen=True)
class Lookup:
    """Read what the records have about the leader; a file system may be slow, so nothing waits for it.

    Attributes:
        location: by the last look.
        seen_at: when that look began; nothing that is older is missing in it.
        looking: number of the look that is under way.
        began: when that one began.
    """

    location: LeaderLocation = field(default_factory=LeaderLocation)
    seen_at: float = -math.inf
    looking: int | None = None
    began: float = -math.inf


@dataclass(frozen=True)
class Preparing:
    """The records are read for a campaign."""

    number: int
    loss: LeaderLoss


@dataclass(frozen=True)
class Campaigning:
    """The agent collects joins, and looks for a leader and for candidates that go before it.

    Attributes:
        number: of the campaign.
        attempts: at the endpoints of those.
        blocks_since: since when it keeps members of the last round from each other; None while it does not.
    """

    number: int
    attempts: Attempts = field(default_factory=Attempts)
    blocks_since: float | None = None


@dataclass(frozen=True)
class Leading:
    """The agent leads in a term of its own."""

    number: int


@dataclass(frozen=True)
class Election:
    """One agent's part in the election.

    Attributes:
        config: see :class:`ElectionConfig`.
        deadline: when the machine has to see a Tick at the latest; infinite if only events matter.
        heartbeat_limit: the one in force, as the last leader has told it: everything that fences here derives from it.
        participant: what the agent has told its leaders, and was told by them.
        known: what it knows of the leader.
        link: to the leader; None while the agent searches.
        search: the newest search, over while `link` is there.
        lookup: see :class:`Lookup`.
        campaign: the agent's own, None while it neither campaigns nor leads.
        campaign_at: when the next campaign may start.
        waited_for: terms whose new leaders were given the time to publish their endpoint.
        twins: where this run is led by another run directory.
        complaint: why no campaign was possible, as logged last.
        numbers: the last number given to an attempt, look or campaign.
        over: True once the run has ended for this agent, or it ends.
    """

    config: ElectionConfig
    participant: Participant
    search: Search
    heartbeat_limit: float
    deadline: float = -math.inf
    known: Leadership = field(default_factory=Leadership)
    link: Following | None = None
    lookup: Lookup = field(default_factory=Lookup)
    campaign: Preparing | Campaigning | Leading | None = None
    campaign_at: float = -math.inf
    waited_for: frozenset[int] = frozenset()
    twins: frozenset[Endpoint] = frozenset()
    complaint: str = ""
    numbers: int = 0
    over: bool = False

    @property
    def leader_limit(self) -> float:
        """Silence after which the leader is lost."""
        return max(self.config.leader_limit, default_leader_limit(self.heartbeat_limit))

    @property
    def role(self) -> Role:
        """The role of the agent in the election."""
        if self.over:
            return Role.STOPPED
        if isinstance(self.campaign, Leading):
            return Role.LEADING
        if isinstance(self.campaign, Campaigning):
            return Role.CAMPAIGNING
        return Role.SEARCHING if self.link is None else Role.FOLLOWING


FOUNDER = 0
"""Number of the campaign of an agent that has claimed the first term of the run before it begins to search."""


def initial_election(config: ElectionConfig, now: float, *, founder: bool = False) -> Election:
    """Return the state of an agent that has just started; it acts with its first Tick.

    Args:
        config: of the agent.
        now: the agent's monotonic time.
        founder: whether it leads already, in the first term of the run.
    """
    return Election(
        config,
        Participant(config.agent, coming=config.coming),
        Search(now),
        config.heartbeat_limit,
        campaign=Leading(FOUNDER) if founder else None,
    )


def step(state: Election, event: Event, now: float) -> tuple[Election, tuple[Action, ...]]:
    """Process one event.

    Args:
        state: as the last step left it.
        event: what happened.
        now: the agent's monotonic time.

    Returns:
        The next state, and what has to be done, in order.
    """
    turn = _Step(state, now)
    turn.forgive(event)
    _HANDLERS[type(event)](turn, event)
    turn.advance()
    turn.change(deadline=turn.deadline())
    return turn.state, tuple(turn.actions)


class _Step:
    """One step under way: the state so far, and the actions so far."""

    def __init__(self, state: Election, now: float) -> None:
        # A copy of its own, which changes in place until the step is over.
        self.state, self.now = replace(state), now
        self.config = state.config
        self.actions: list[Action] = []
        # When the next attempts start, and how long the search goes before a campaign, once that is known.
        self.attempts_at = self.rivals_at = self.delay = math.inf

    def change(self, **changes: Any) -> None:
        self.state.__dict__.update(changes)

    def change_search(self, **changes: Any) -> None:
        self.change(search=replace(self.state.search, **changes))

    def number(self) -> int:
        self.change(numbers=self.state.numbers + 1)
        return self.state.numbers

    def do(self, action: Action) -> None:
        self.actions.append(action)

    # Time.

    def forgive(self, event: Event) -> None:
        """Give the leader time if this agent was paused: a leader that was paused, too, has only just become silent.

        As when a whole job is suspended and goes on node by node. Once: an agent that is always late has to find out
        some time that it has no leader.
        """
        link, limit = self.state.link, self.state.heartbeat_limit
        if link is None or (isinstance(event, Received) and event.number == link.number):
            return
        suspicious = limit * SUSPICIOUS
        meant = max(self.state.deadline, link.heard_at + suspicious)
        if self.now > meant + limit * LATE and link.heard_at != link.forgiven:
            heard_at = self.now - suspicious
            self.change(link=replace(link, heard_at=heard_at, forgiven=heard_at))

    def advance(self) -> None:
        """Do whatever is due."""
        if self.state.over:
            return
        if self.state.link is not None:
            self._watch(self.state.link)
        if self.state.link is None:
            self._search()
        if isinstance(self.state.campaign, Campaigning) and not self.state.over:
            self._look_for_rivals(self.state.campaign)

    def deadline(self) -> float:
        """When something is due that no event announces."""
        state = self.state
        if state.over:
            return math.inf
        moments = []
        link = state.link
        if link is not None:
            limit = state.heartbeat_limit
            if self.now < link.heard_at + limit * SUSPICIOUS:
                moments.append(link.heard_at + limit * SUSPICIOUS)
            else:
                moments.append(link.heard_at + state.leader_limit)
                if self.now < link.heard_at + limit * FENCE:
                    moments.append(link.heard_at + limit * FENCE)
                if link.reconnect is None:
                    moments.append(link.reconnect_at)
        else:
            moments += self._search_deadlines()
        if isinstance(state.campaign, Campaigning):
            moments.append(self.rivals_at)
            if state.campaign.blocks_since is not None:
                moments.append(state.campaign.blocks_since + BLOCKING_LIMIT)
        if state.lookup.looking is None and (link is None or isinstance(state.campaign, Campaigning)):
            moments.append(state.lookup.seen_at + READ_AGAIN)
        return min(moments)

    def _search_deadlines(self) -> list[float]:
        state, config, search = self.state, self.config, self.state.search
        moments = [
            search.began + config.connect_timeout,
            self.attempts_at,
        ]
        if self.now < search.began + RESTORE:
            moments.append(search.began + RESTORE)
        if search.lost_at is not None:
            if state.campaign is None and config.campaign is not None and state.lookup.seen_at >= search.lost_at:
                moments.append(max(search.lost_at + self.delay, state.campaign_at))
        elif search.lost is not None:
            moments.append(search.heard_at + state.leader_limit)
        elif state.lookup.location.published:
            moments.append(search.began + state.leader_limit)
        elif self.now < search.began + UNLED:
            moments.append(search.began + UNLED)
        return moments

    # Following.

    def _watch(self, link: Following) -> None:
        """Look at the silence of the leader.

        While the leader is merely silent a second link is tried beside the first: either the leader is paused, then the
        first one goes on; or the network was cut, and TCP would take many seconds to notice that it is whole again.
        """
        limit = self.state.heartbeat_limit
        if self.now < link.heard_at + limit * SUSPICIOUS:
            return
        if self.now >= link.heard_at + self.state.leader_limit:
            self.do(CloseLink(link.number))
            self._lose(link)
            return
        if self.now >= link.heard_at + limit * FENCE:
            self._fence("the leader is silent")
        if link.reconnect is None and self.now >= link.reconnect_at:
            number = self.number()
            self.do(Connect(number, link.endpoint, limit * RECONNECT))
            self.change(link=replace(link, reconnect=number))

    def _lose(self, link: Following) -> None:
        """The link to the leader is of no more use: search for one."""
        if link.reconnect is not None:
            self.do(CancelConnect(link.reconnect))
        search = Search(self.now, link.endpoint, link.heard_at, self.now if self.state.known.resigned else None)
        self.change(link=None, search=search, lookup=Lookup())

    def _use(self, number: int, endpoint: Endpoint) -> None:
        """Follow the leader at the other end of this link."""
        self.change(link=Following(number, endpoint, self.now), known=replace(self.state.known, resigned=False))
        participant, greeting = self.state.participant.greet(self.now)
        self.change(participant=participant)
        for message in greeting:
            self.do(Send(number, message))

    def _say(self, message: AgentMessage) -> None:
        # What cannot be sent now is not lost: every new link begins with what the leader has to know.
        if self.state.link is not None:
            self.do(Send(self.state.link.number, message))

    def _fence(self, why: str) -> None:
        """Stop the workers here: the leader gives up this agent about now, and goes on without it."""
        cut_off = self.state.participant.unheard()
        if cut_off is not None and cut_off.last_round is not None:
            self.change(participant=cut_off)
            self.do(StopWorkers(CutOff(cut_off.last_round, Reason.NODE_LOST, self.state.known.node, why)))

    # Searching.

    def _search(self) -> None:
        search = self.state.search
        if search.lost is not None and self.now >= search.began + RESTORE:
            self._fence("the link to the leader is broken")
        if search.lost_at is None:
            lost_at = self._lost_at()
            if lost_at is not None:
                self.change_search(lost_at=lost_at)
        if self._look():
            return
        search = self.state.search
        starting, self.attempts_at = attempting.due(search.attempts, self._endpoints(), self.now)
        if starting:
            self.change_search(attempts=self._start(search.attempts, starting))
        self._campaign_if_due()
        if self.now >= search.began + self.config.connect_timeout:
            problem = search.attempts.problem
            self._give_up(LeaderLost(problem) if search.lost is not None else self._unreachable(problem))

    def _look(self) -> bool:
        """Look at the records if it is time for it. Returns whether they say that there will be no leader."""
        lookup, since = self.state.lookup, self.state.search.lost_at if self.state.link is None else None
        if lookup.location.refusal and self.state.link is None:
            self._give_up(Unreachable(lookup.location.refusal, usage=True))
            return True
        old = self.now >= lookup.seen_at + READ_AGAIN or (since is not None and lookup.seen_at < since)
        if lookup.looking is None and old:
            number = self.number()
            self.do(LookForLeader(number))
            self.change(lookup=replace(lookup, looking=number, began=self.now))
        return False

    def _lost_at(self) -> float | None:
        """Since when it is certain that there is no leader where there was one; None as long as it is not."""
        state, search, now = self.state, self.state.search, self.now
        if search.lost is not None:
            return now if search.attempts.answer(search.lost) in _LEADS_NONE or self._is_silent() else None
        location = state.lookup.location
        if not location.published:
            if now < search.began + UNLED or self.config.campaign is None:
                return None
            # To lead the same run a second time is the last thing to do, also when the other leader is silent for once
            # or has finished it.
            twins = search.attempts.with_answer(Answer.TWIN)
            if twins and not state.twins:
                self.do(Warn(_twin(twins)))
            if not twins <= state.twins:
                self.change(twins=state.twins | twins)
            return None if self.state.twins else now
        gone = all(search.attempts.answer(endpoint) in _LEADS_NONE for endpoint in location.endpoints)
        return now if gone or now >= search.began + self.state.leader_limit else None

    def _is_silent(self) -> bool:
        return self.now >= self.state.search.heard_at + self.state.leader_limit

    def _endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of the search, in order."""
        state, search = self.state, self.state.search
        if isinstance(state.campaign, _FOLLOWS_ITSELF):
            return self.config.endpoints[:1]
        location, left, last = state.lookup.location, state.known.left, state.known.endpoint
        endpoints = [endpoint for endpoint in location.endpoints if endpoint != left]
        if search.lost is not None and search.lost != left:
            endpoints.insert(0, search.lost)
        if search.lost_at is not None or self.now >= search.began + RESTORE:
            order = state.known.order(location)
            endpoints += self._first_of(order)
            if last is not None and last not in (left, *self.config.endpoints):
                # It may campaign again. Candidates step down for it, so they have to find it then.
                endpoints.append(last)
        return tuple(dict.fromkeys(endpoints))

    def _first_of(self, order: Sequence[Successor]) -> list[Endpoint]:
        """The endpoints of the first that may campaign, and of those before them; every second of so many more.

        A round on record may have thousands of members, each of which would otherwise try each other.
        """
        attempts, leaving = self.state.search.attempts, self.state.known.leaving
        most = FIRST_TRIED * (1 + int(self.now - self.state.search.began))
        endpoints: list[Endpoint] = []
        for each in order:
            if each.agent == self.config.agent:
                continue
            endpoint = (each.address, each.port)
            endpoints.append(endpoint)
            in_vain = attempts.answer(endpoint) in (Answer.ENDED, Answer.SILENT)
            most -= not in_vain and each.agent not in leaving
            if most <= 0:
                break
        return endpoints

    def _give_up(self, event: LeaderEvent) -> None:
        self.stop(Stop())
        self.do(Deliver(event))

    def _unreachable(self, problem: str) -> Unreachable:
        if self.state.twins and not self.state.lookup.location.published:
            return Unreachable(_twin(self.state.twins), usage=True)
        return Unreachable(problem)

    def _start(self, attempts: Attempts, endpoints: Collection[Endpoint]) -> Attempts:
        for endpoint in endpoints:
            number = self.number()
            attempts = attempting.begin(attempts, endpoint, number, self.now)
            self.do(Connect(number, endpoint))
        return attempts

    def _cancel(self, attempts: Attempts, kept: int | None = None) -> None:
        for number in attempts.pending():
            if number != kept:
                self.do(CancelConnect(number))

    # Campaigning.

    def _ended(self) -> tuple[list[Successor], set[str]]:
        """The order of succession, and the agents in it whose process has ended."""
        order = [*self.state.known.order(self.state.lookup.location)]
        ended = self.state.search.attempts.with_answer(Answer.ENDED)
        return order, {each.agent for each in order if (each.address, each.port) in ended} | self.state.known.gone

    def _campaign_delay(self) -> float:
        order, gone = self._ended()
        names = [each.agent for each in order]
        return campaign_delay(names, self.config.agent, gone, self.state.known.leaving)

    def _campaign_if_due(self) -> None:
        state, search = self.state, self.state.search
        if state.campaign is not None or self.config.campaign is None or search.lost_at is None:
            return
        # Another agent may lead since an earlier look.
        if state.lookup.seen_at < search.lost_at:
            return
        self.delay = self._campaign_delay()
        if self.now >= max(search.lost_at + self.delay, state.campaign_at):
            number = self.number()
            self.change(campaign=Preparing(number, self._loss()), campaign_at=self.now + CAMPAIGN_AGAIN)
            self.do(LookForCampaign(number))

    def _loss(self) -> LeaderLoss:
        known, search = self.state.known, self.state.search
        order, gone = self._ended()
        silent = frozenset[str]()
        if search.lost is not None and (lost := self._agent_at(search.lost, order)):
            if search.attempts.answer(search.lost) is Answer.ENDED:
                gone |= {lost}
            elif self._is_silent() and lost not in gone:
                silent = frozenset({lost})
        return LeaderLoss(
            Reason.NODE_LEFT if known.resigned else Reason.NODE_LOST, frozenset(gone), silent, known.round
        )

    def _agent_at(self, endpoint: Endpoint, order: Collection[Successor]) -> str:
        """The agent that listens there, empty if it is not known.

        A leader that is lost before it gave an assignment here is not the one that gave the last.
        """
        known = self.state.known
        if endpoint == known.endpoint:
            return known.leader
        return next((each.agent for each in order if (each.address, each.port) == endpoint), "")

    def _rivals(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of a possible leader, or of a candidate that precedes this one."""
        known, location = self.state.known, self.state.lookup.location
        order = known.order(location)
        names = [each.agent for each in order]
        own = self.config.agent
        ahead = order[: names.index(own)] if own in names else order
        endpoints = [*location.endpoints, *((each.address, each.port) for each in ahead)]
        if known.endpoint is not None:
            # The last leader is no successor of its own. It may have come back too late to lead, and campaign as well.
            endpoints.append(known.endpoint)
        others = (known.left, *self.config.endpoints)
        return tuple(dict.fromkeys(endpoint for endpoint in endpoints if endpoint not in others))

    def _look_for_rivals(self, campaign: Campaigning) -> None:
        """Look for a leader and for candidates that go before this one; step down if this one blocks others."""
        if self.state.link is not None:
            self._look()
        if campaign.blocks_since is not None and self.now >= campaign.blocks_since + BLOCKING_LIMIT:
            self._step_down()
            return
        starting, self.rivals_at = attempting.due(campaign.attempts, self._rivals(), self.now)
        if starting:
            self.change(campaign=replace(campaign, attempts=self._start(campaign.attempts, starting)))

    def _step_down(self) -> None:
        """Leave it to another agent to lead."""
        campaign = self.state.campaign
        if isinstance(campaign, Campaigning):
            self._cancel(campaign.attempts)
            self.do(StopLeading(campaign.number))
            self.change(campaign=None, campaign_at=self.now + STEP_DOWN)

    # What happens.

    def tick(self, event: Tick) -> None:
        """Nothing but time."""

    def opened(self, event: LinkOpened) -> None:
        state, link, campaign = self.state, self.state.link, self.state.campaign
        outdated = event.term < state.known.term
        if link is not None and link.reconnect == event.number and not state.over:
            if outdated:
                self.failed(LinkFailed(event.number, Answer.SILENT, _FOLLOWED))
                self.do(CloseLink(event.number))
            else:
                # The leader has ended the older one for it.
                self.do(CloseLink(link.number))
                self._use(event.number, event.endpoint)
            return
        searching = link is None and not state.over
        endpoint = state.search.attempts.endpoint(event.number) if searching else None
        if endpoint is not None:
            if outdated:
                self.failed(LinkFailed(event.number, Answer.SILENT, f"{_at(endpoint)} is {_FOLLOWED}"))
                self.do(CloseLink(event.number))
                return
            rival = isinstance(campaign, Campaigning) and endpoint in self._rivals()
            if endpoint not in self._endpoints() and not rival:
                self.failed(LinkFailed(event.number, Answer.SILENT, f"{_at(endpoint)} is asked no more"))
                self.do(CloseLink(event.number))
                return
            self._cancel(state.search.attempts, kept=event.number)
            self.change_search(attempts=Attempts())
            if event.endpoint not in self.config.endpoints:
                # A candidate would end by itself with the next break of this link.
                self._step_down()
            if isinstance(self.state.campaign, Preparing):
                # An agent that has found a leader does not campaign, however long the records take.
                self.change(campaign=None)
            self._use(event.number, event.endpoint)
            return
        self.do(CloseLink(event.number))
        if isinstance(campaign, Campaigning) and (rival_at := campaign.attempts.endpoint(event.number)) is not None:
            if outdated:
                self.failed(LinkFailed(event.number, Answer.SILENT, f"{_at(rival_at)} is {_FOLLOWED}"))
            else:
                self._step_down()

    def failed(self, event: LinkFailed) -> None:
        state, link, campaign = self.state, self.state.link, self.state.campaign
        if link is not None and link.reconnect == event.number:
            again_at = self.now + self.state.heartbeat_limit * RECONNECT_AGAIN
            self.change(link=replace(link, reconnect=None, reconnect_at=again_at))
            if link.closed:
                self._lose(replace(link, reconnect=None))
            return
        endpoint = state.search.attempts.endpoint(event.number) if link is None else None
        if endpoint is not None:
            failed = attempting.answered(state.search.attempts, endpoint, event.answer, event.problem, event.busy)
            self.change_search(attempts=failed)
            if event.answer is Answer.VERSION and not state.over:
                self._give_up(Unreachable(event.problem, usage=True))
        elif isinstance(campaign, Campaigning) and (rival := campaign.attempts.endpoint(event.number)) is not None:
            failed = attempting.answered(campaign.attempts, rival, event.answer, event.problem, event.busy)
            self.change(campaign=replace(campaign, attempts=failed))

    def closed(self, event: LinkClosed) -> None:
        link = self.state.link
        if link is None or link.number != event.number:
            return
        if link.reconnect is not None:
            self.change(link=replace(link, closed=True))
        else:
            self._lose(link)

    def location_seen(self, event: LocationSeen) -> None:
        if self.state.lookup.looking == event.number:
            self.change(lookup=Lookup(event.location, self.state.lookup.began))

    def campaign_records_seen(self, event: CampaignRecordsSeen) -> None:
        campaign, config = self.state.campaign, self.config.campaign
        if not isinstance(campaign, Preparing) or campaign.number != event.number or config is None:
            return
        try:
            claimed = campaigning.another_has_claimed(config, event.records)
            if claimed is not None and claimed not in self.state.waited_for:
                # That agent publishes its endpoint in a moment; unless it has died in between.
                self.change(campaign=None, waited_for=self.state.waited_for | {claimed})
                return
            plan = campaigning.plan(config, event.records, campaign.loss)
        except (LookupError, TypeError, ValueError) as error:
            self.campaign_failed(CampaignFailed(event.number, str(error)))
            return
        self.change(campaign=Campaigning(campaign.number))
        self.do(Lead(campaign.number, plan))

    def campaign_failed(self, event: CampaignFailed) -> None:
        campaign = self.state.campaign
        if not isinstance(campaign, Preparing) or campaign.number != event.number:
            return
        self.change(campaign=None)
        if event.why != self.state.complaint:
            self.change(complaint=event.why)
            self.do(Warn(f"this agent cannot campaign to lead: {event.why}"))

    def claimed(self, event: TermClaimed) -> None:
        campaign = self.state.campaign
        if isinstance(campaign, Campaigning) and campaign.number == event.number:
            self._cancel(campaign.attempts)
            self.change(campaign=Leading(campaign.number))

    def blocked(self, event: CampaignBlocked) -> None:
        campaign = self.state.campaign
        if isinstance(campaign, Campaigning) and campaign.number == event.number:
            self.change(campaign=replace(campaign, blocks_since=self.now if event.blocks else None))

    def leader_ended(self, event: LeaderEnded) -> None:
        campaign = self.state.campaign
        if campaign is None or campaign.number != event.number:
            return
        if isinstance(campaign, Campaigning):
            self._cancel(campaign.attempts)
        self.change(campaign=None)
        if event.problem:
            self.do(Deliver(LeaderLost(event.problem)))

    def join(self, event: Join) -> None:
        participant, joined = self.state.participant.join(event.candidate)
        self.change(participant=participant)
        self._say(joined)

    def announce_leave(self, event: AnnounceLeave) -> None:
        participant, leaving = self.state.participant.leaving(event.reason, event.seconds, self.now)
        self.change(participant=participant, known=self.state.known.leaves((self.config.agent,)))
        self._say(leaving)

    def report_step(self, event: ReportStep) -> None:
        self._say(self.state.participant.held(event.round, event.step))

    def depart(self, event: Depart) -> None:
        participant, left = self.state.participant.left(event.reason, stopped=event.stopped)
        self.change(participant=participant, known=self.state.known.leaves((self.config.agent,)))
        self._say(left)

    def report_failure(self, event: ReportFailure) -> None:
        participant, failed = self.state.participant.failed(event.failure)
        self.change(participant=participant)
        self._say(failed)

    def report_finished(self, event: ReportFinished) -> None:
        participant, finished = self.state.participant.finished()
        self.change(participant=participant)
        self._say(finished)

    def request_leave(self, event: RequestLeave) -> None:
        self._say(LeaveRequest(self.config.agent, (), event.job, event.reason, event.seconds, event.detail))

    def close_run(self, event: CloseRun) -> None:
        participant, closed = self.state.participant.closing()
        self.change(participant=participant)
        self._say(closed)

    def workers_stopped(self, event: WorkersStopped) -> None:
        self.change(participant=self.state.participant.stopped())

    def stop(self, event: Stop) -> None:
        if self.state.link is None:
            self._cancel(self.state.search.attempts)
        elif self.state.link.reconnect is not None:
            self.do(CancelConnect(self.state.link.reconnect))
        if isinstance(self.state.campaign, Campaigning):
            self._cancel(self.state.campaign.attempts)
        if isinstance(self.state.campaign, Preparing):
            self.change(campaign=None)
        self.change(over=True)

    # What the leader says.

    def _goes_by(self, heartbeat_limit: float) -> None:
        """Note the heartbeat limit in force."""
        if heartbeat_limit and heartbeat_limit != self.state.heartbeat_limit:
            self.change(heartbeat_limit=heartbeat_limit)

    def received(self, event: Received) -> None:
        link, participant, known = self.state.link, self.state.participant, self.state.known
        if link is None or link.number != event.number:
            return
        self.change(link=replace(link, heard_at=self.now))
        message = event.message
        match message:
            case Beat(limit):
                self._goes_by(limit)
                self._say(_BEAT)
            case Probed(probe):
                self.do(AnswerProbe(link.number, probe))
            case Assignment(attempt=attempt, round=round_, restarts=restarts):
                participant = participant.charged(restarts)
                placed = participant.placed(attempt, round_)
                self.change(participant=placed or participant)
                if placed is not None:
                    self.change(known=known.placed(message, link.endpoint))
                    self._goes_by(message.heartbeat_limit)
                    self.do(Deliver(message))
            case Resigned(agent, gone):
                self.change(known=known.resigns(agent, gone, link.endpoint))
            case Holding(round_, leaving):
                self.change(known=known.leaves(leaving))
                if participant.holding(round_):
                    if self.config.can_hold:
                        self.do(Deliver(message))
                    else:
                        self._say(participant.held(round_, None))
            case Stopping(round=round_, step=at, leaving=leaving):
                self.change(known=known.leaves(leaving))
                stopping = participant.stopping(round_, at)
                if stopping is not None:
                    self.change(participant=stopping)
                    self.do(Deliver(message))
            case Interrupted(round=round_, restarts=restarts):
                participant = participant.charged(restarts)
                self.change(participant=participant)
                if participant.interrupted(round_):
                    self.change(participant=participant.told_over())
                    self.do(Deliver(message))
                elif participant.candidate is not None:
                    # The leader gave an assignment in that round, which was lost on the way.
                    self.join(Join(participant.candidate))
            case Ended():
                self.stop(Stop())
                self.do(Deliver(message))
            case Waiting() | LeaveRequested():
                self.do(Deliver(message))
            case _:
                pass


_HANDLERS: dict[type, Callable[[_Step, Any], None]] = {
    Tick: _Step.tick,
    LinkOpened: _Step.opened,
    LinkFailed: _Step.failed,
    LinkClosed: _Step.closed,
    Received: _Step.received,
    LocationSeen: _Step.location_seen,
    CampaignRecordsSeen: _Step.campaign_records_seen,
    CampaignFailed: _Step.campaign_failed,
    TermClaimed: _Step.claimed,
    CampaignBlocked: _Step.blocked,
    LeaderEnded: _Step.leader_ended,
    Join: _Step.join,
    AnnounceLeave: _Step.announce_leave,
    ReportStep: _Step.report_step,
    Depart: _Step.depart,
    ReportFailure: _Step.report_failure,
    ReportFinished: _Step.report_finished,
    RequestLeave: _Step.request_leave,
    CloseRun: _Step.close_run,
    WorkersStopped: _Step.workers_stopped,
    Stop: _Step.stop,
}

_BEAT = Beat()
_FOLLOWS_ITSELF = (Campaigning, Leading)
_LEADS_NONE = (Answer.ENDED, Answer.IDLE)

_FOLLOWED = "a leader that has been followed by another"


def _at(endpoint: Endpoint) -> str:
    return f"{endpoint[0]}:{endpoint[1]}"


def _twin(endpoints: Collection[Endpoint]) -> str:
    where = ", ".join(sorted(_at(endpoint) for endpoint in endpoints))
    return (
        f"a run of this id is led from {where} by another run directory; give one that all nodes share by --run-dir, or"
        " another --run-id"
    )
