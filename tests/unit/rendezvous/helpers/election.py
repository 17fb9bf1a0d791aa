"""The election machine of one agent, played in virtual time against a network and records that a test describes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from slurm_elastic.rendezvous.election import events, machine, state
from slurm_elastic.rendezvous.election.campaign import CampaignRecords, ElectionConfig, LeaderLoss
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation, Leadership
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.messages import Assignment, Endpoint, Successor

OWN: Endpoint = ("127.0.0.1", 9)

Result = tuple[float, Answer | int]
"""Seconds that an attempt to connect takes, and why it failed or the term in which the other side leads."""


FIRST, SECOND = ("n1", 1), ("n2", 2)
ORDER = tuple(Successor(f"n{rank}/0.0/{rank}", f"n{rank}", rank) for rank in (1, 2, 3))
"""The members of the last round, which the first of them led."""
PUBLISHED = LeaderLocation((FIRST,), published=True, successors=ORDER, round=0)
TOLD = Leadership(1, ORDER[0].agent, ORDER[1:], 0, endpoint=FIRST)
"""What a member of that round was told."""
PLACE = Place("n3/0.0/3", "n3", rank=2, local_world_size=1, base_rank=2, role="", role_base_rank=2, role_world_size=3)
PLACED = Assignment(
    1, PLACE, 0, Reason.START, 3, 3, "n1", 1, 0, epoch=1, leader=ORDER[0].agent, leader_node="n1", successors=ORDER[1:]
)
RECORDED = Situation(
    {"agent": ORDER[0].agent, "address": "n1", "port": 1, "epoch": 1},
    0,
    {
        "scope": "7.0",
        "leader": ORDER[0].agent,
        "restarts": 0,
        "endpoint": {"agent": ORDER[0].agent, "address": "n1", "port": 1, "epoch": 1},
        "places": [
            {"agent": each.agent, "node": each.address, "address": each.address, "standby_port": each.port}
            for each in ORDER
        ],
    },
)
"""That round, as the records show it."""
CANDIDATE = AgentInfo("n3/0.0/3", "n3", 2, 1, "trainer", "n3", 1)


def role(election: state.Election) -> str:
    """What an agent does in the election."""
    if election.over:
        return "stopped"
    if isinstance(election.campaign, state.Leading):
        return "leading"
    if isinstance(election.campaign, state.Campaigning):
        return "campaigning"
    return "searching" if election.link is None else "following"


class Play:
    """One agent, which may campaign, and knows nothing at first.

    Args:
        agent: its identity.
        locate: what the records say at a moment; known at once.
        connect: what an attempt to connect at a moment comes to.
        known: what it was told of its leader.
        leads: whether it may campaign.
        options: of rounds, and the bounds of the run.
    """

    def __init__(
        self,
        agent: str = "n3/0.0/3",
        locate: Callable[[float], LeaderLocation] = lambda now: LeaderLocation(),
        connect: Callable[[Endpoint, float], Result] = lambda endpoint, now: (1.0, Answer.SILENT),
        known: Leadership | None = None,
        *,
        leads: bool = True,
        **options: object,
    ) -> None:
        settings = Settings(**{"min_nodes": 1, "max_nodes": 8, "agent": agent, **options})  # type: ignore[arg-type]
        config = ElectionConfig(incarnation="7.0", settings=settings, endpoints=(OWN, ("n3", 9)), has_workers=False)
        self.now = 0.0
        self.state: state.Election = state.initial_election(config, 0.0)
        if not leads:
            self.state = replace(self.state, campaign_at=math.inf)
        if known is not None:
            self.state = replace(self.state, known=known)
        self._locate, self._connect = locate, connect
        self._heap: list[tuple[float, int, events.Event]] = []
        self._count = itertools.count()
        self._cancelled: set[int] = set()
        self.opened: set[int] = set()
        self._losses: list[LeaderLoss] = []
        self.actions: list[tuple[float, events.Action]] = []
        self.records: Callable[[], CampaignRecords] = lambda: CampaignRecords(0, Situation(None, None, None))

    def lose(self, endpoint: Endpoint, last_message_at: float = 0.0) -> None:
        """The link to the leader there is lost."""
        lost_at = 0.0 if self.state.known.resigned else None
        self.state = replace(self.state, search=state.Search(self.now, endpoint, last_message_at, lost_at))

    def run(self, until: float) -> Play:
        """Play until this moment, or until nothing can happen any more."""
        if not self.actions:
            self.handle(events.Tick())
        while self._next_at() < until:
            self.handle_next()
        self.now = until
        return self

    def handle_next(self) -> None:
        """Play what happens next."""
        self.now = max(self.now, self._next_at())
        if self._heap and self._heap[0][0] <= self.now:
            self.handle(heapq.heappop(self._heap)[2])
        else:
            self.handle(events.Tick())

    def _next_at(self) -> float:
        return min(self._heap[0][0] if self._heap else math.inf, self.state.deadline)

    def sleep(self, seconds: float) -> Play:
        """The process does nothing for so long, and looks at the clock first when it goes on."""
        self.now += seconds
        self.handle(events.Tick())
        return self

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.LinkFailed | events.LinkOpened) and event.number in self._cancelled:
            return
        if isinstance(event, events.LinkOpened):
            self.opened.add(event.number)
        self.state, actions = machine.step(self.state, event, self.now)
        assert self.state.deadline > self.now or not isinstance(event, events.Tick), (
            "it would look at its clock without end"
        )
        for action in actions:
            self.actions.append((self.now, action))
            self._act(action)

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Connect(number, endpoint, timeout):
                seconds, outcome = self._connect(endpoint, self.now)
                if timeout is not None and seconds > timeout:
                    seconds, outcome = timeout, Answer.SILENT
                event: events.Event = (
                    events.LinkFailed(number, outcome, outcome.value)
                    if isinstance(outcome, Answer)
                    else events.LinkOpened(number, endpoint, outcome)
                )
                self.later(seconds, event)
            case events.CloseLink(number):
                self._cancelled.add(number)
            case events.ReadLeaderLocation(number):
                self.later(0.0, events.LeaderLocationRead(number, self._locate(self.now)))
            case events.ReadCampaignRecords(number):
                assert isinstance(self.state.campaign, state.Preparing)
                self._losses.append(self.state.campaign.loss)
                self.later(0.0, events.CampaignRecordsRead(number, self.records()))
            case _:
                pass

    def later(self, seconds: float, event: events.Event) -> None:
        """Let something happen in a while."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._count), event))

    # What came of it.

    def times(self, kind: type[events.Action]) -> list[float]:
        """When actions of this kind were taken."""
        return [moment for moment, action in self.actions if isinstance(action, kind)]


def refuse(endpoint: Endpoint, now: float) -> Result:
    return 0.0, Answer.ENDED


def cut(endpoint: Endpoint, now: float) -> Result:
    return 1.0, Answer.SILENT


def idle(endpoint: Endpoint, now: float) -> Result:
    """The leader has ended; the others live and do not lead."""
    return 0.0, Answer.ENDED if endpoint == FIRST else Answer.IDLE


def member(rank: int, known: Leadership = TOLD, **arguments: object) -> Play:
    """A member of the last round, which has lost its link to the leader."""
    agent = ORDER[rank - 1]
    play = Play(agent.agent, known=known, **{"locate": lambda now: PUBLISHED, **arguments})  # type: ignore[arg-type]
    play.records = lambda: CampaignRecords(1, RECORDED)
    play.lose(FIRST)
    return play
