"""An agent in virtual time: its process and its workers around the product's election machine."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.election import events, machine
from slurm_elastic.rendezvous.election.campaign import (
    CampaignRecords,
    ElectionConfig,
    LeaderLoss,
    default_leader_limit,
    locate,
    plan,
)
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.election.state import FOUNDER, Leading, initial_election
from slurm_elastic.rendezvous.membership import events as membership
from slurm_elastic.rendezvous.membership.agents import STEPPED, AgentInfo, LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.config import OnTie, Settings
from slurm_elastic.rendezvous.membership.events import Interrupted, Leaving, Left, Ponged, Waiting, WorkerFailed
from slurm_elastic.rendezvous.transport.messages import Assignment, Endpoint, LeaderMessage
from tests.simulation.election.checks import NAP, STOP
from tests.simulation.election.leader import Leader
from tests.simulation.election.wire import Closed, Wire
from tests.simulation.virtual import Process
from tests.unit.rendezvous.helpers.election import role

if TYPE_CHECKING:
    from tests.simulation.election.world import World

INCARNATION = "run.0"
GRACE = 30.0
"""Seconds in which a leader without workers hands over; then it is killed."""
STOOD_STILL = 2 / 3
"""Of the heartbeat limit: an agent that goes on after so much silence gives the leader time; see the machine."""


class Agent(Process):
    """One agent.

    Attributes:
        position: of its node.
        trains: whether it ever has workers; one that does not only leads.
        on_tie: whether it leads on with half of a round; agents may have been told different things.
        refuses: once it does not: whether its node tells others so.
        awake_since: when its last pause ended.
        leaving: whether it has announced that it goes.
        workers: the round whose workers exist here. The truth, not what anybody believes.
        stepped: whether these have taken a step, or those of the last round if there are none; `has_stepped`: whether
            those of any round have.
        election: state of the product's machine.
        leader: the leader that runs here, with or without a term of its own.
        last_message_at: when something came over its link to a leader last.
        unlinked_since: since when it has no such link; infinite while it has one.
    """

    def __init__(self, world: World, name: str, node: str, position: int, *, trains: bool, founder: bool) -> None:
        super().__init__(world)
        self.world, self.name, self.position, self.trains = world, name, position, trains
        self.rng = random.Random(f"{world.seed} {name}")
        self.on_tie = OnTie.NONE if self.rng.random() < 0.15 else OnTie.LEADER
        self.refuses, self.leaving = True, False
        self.awake_since = -math.inf
        self.workers: int | None = None
        self.stepped = self.has_stepped = False
        self.leader: Leader | None = None
        self.last_message_at = world.now
        self.unlinked_since = world.now
        self.endpoint: Endpoint = (name, 1)
        self.links: dict[int, Wire] = {}
        self._cancelled: set[int] = set()
        settings = Settings(
            min_nodes=1,
            max_nodes=16,
            max_restarts=16,
            agent=name,
            on_tie=self.on_tie,
            join_timeout=1000.0,
            heartbeat_limit=world.limit,
        )
        config = ElectionConfig(
            incarnation=INCARNATION,
            settings=settings,
            endpoints=(self.endpoint,),
            leader_limit=default_leader_limit(world.limit),
            has_workers=trains,
        )
        self.election = initial_election(config, world.now, founder=founder)
        self._candidate = AgentInfo(name, node, position, 1, "trainer", name, 20000, standby_port=1)
        self._events: deque[events.Event] = deque()
        self._busy = False
        self._stopping = self._said_goodbye = False
        self._look_at = math.inf
        self._founder = founder

    def start(self) -> None:
        """Lead, if the run has no leader yet, and join."""
        config = self.election.config
        if self._founder:
            first = plan(config, self._read_campaign(), LeaderLoss(Reason.START))
            self._act(events.Lead(FOUNDER, first))
        self._join()
        self.wake_at(self.world.now)

    @property
    def restarts(self) -> int:
        """Worker failures charged so far, as it was told."""
        return self.election.follower.restarts

    # The process.

    def go_on(self) -> None:
        """End a pause."""
        if self.world.now - self.last_message_at > STOOD_STILL * self.world.limit:
            # It cannot tell whether the leader was paused, too.
            self.last_message_at = self.world.now - self.world.limit / 2
        self.awake_since = self.world.now
        super().go_on()
        self.world.checks.after_pause(self)
        self.world.carry_on()

    def end(self, *, silent: bool) -> None:
        """The process and its workers end at once; with its node, nobody is told."""
        if not self.alive:
            return
        self.alive, self.workers, self.refuses = False, None, not silent
        self.world.dead_since.setdefault(self.name, self.world.now)
        if self.leader is not None:
            self.leader.end(told=not silent)
        for wire in self.links.values():
            wire.close_by_member(told=not silent)

    # Time.

    def wake_at(self, moment: float) -> None:
        """Look at the clock then, or a little later."""
        if moment < self._look_at > self.world.now:
            self._look_at = moment = max(moment, self.world.now)
            self.later(moment - self.world.now + NAP * self.rng.random(), self._look, moment)

    def _look(self, moment: float) -> None:
        if moment != self._look_at:
            return
        self._look_at = math.inf
        if self.leader is not None:
            self.leader.look()
        if self.world.now >= self.election.deadline:
            self.handle(events.Tick())
        self.wake_at(self.election.deadline)
        if self.leader is not None:
            self.wake_at(self.leader.next_look())
        self.world.checks.after_look(self)

    # The election.

    def handle(self, event: events.Event) -> None:
        """Let the machine process an event, and carry out its actions."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events and self.alive:
            before = self.election
            event = self._events.popleft()
            self.election, actions = machine.step(before, event, self.world.now)
            if self.world.transcript is not None and (now := role(self.election)) != role(before):
                self.world.tell(self.name, f"is {now} after {event}")
            link = self.election.link
            if link is None:
                self.unlinked_since = min(self.unlinked_since, self.world.now)
            else:
                self.unlinked_since = math.inf
                if before.link is None or before.link.number != link.number:
                    self.last_message_at = self.world.now
            for action in actions:
                self._act(action)
        self._busy = False
        self.wake_at(self.election.deadline)

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Send(number, message):
                if number in self.links:
                    self.links[number].send_up(message)
            case events.AnswerProbe(number, probe):
                if number in self.links:
                    self.links[number].send_up(Ponged(self.name, probe))
            case events.Connect(number, endpoint, timeout):
                self.world.attempt(
                    self, endpoint[0], timeout, lambda answer, wire: self._answered(number, answer, wire)
                )
            case events.CloseLink(number):
                self._cancelled.add(number)
                wire = self.links.pop(number, None)
                if wire is not None:
                    wire.close_by_member()
            case events.ReadLeaderLocation(number, known):
                self._read(lambda: events.LeaderLocationRead(number, self._locate(known)))
            case events.ReadCampaignRecords(number):
                self._read(lambda: events.CampaignRecordsRead(number, self._read_campaign()))
            case events.Lead(number, campaign):
                self.leader = Leader(self.world, self, number, campaign, INCARNATION)
                self.leader.handle(membership.Tick())
            case events.StopLeading():
                if self.leader is not None:
                    self.leader.end()
            case events.Deliver(events.CutOff() as cut_off):
                self.world.tell(self.name, f"stops by itself: {cut_off.detail}")
                self._stop_workers(self._join)
            case events.Deliver(told):
                self._hear(told)
            case events.Warn(line):
                self.world.tell(self.name, line)
                # Of all that it warns of, a schedule has cuts only: there is one run, and its records are in order.
                assert line.startswith("no leader found"), line
            case _:
                raise AssertionError(action)

    def _read(self, look: Callable[[], events.Event]) -> None:
        """Look at the records at some moment, and know the result at a later one."""

        def happen() -> None:
            seen = look()
            self.later(self.world.disk(), self.handle, seen)

        self.world.at(self.world.now + self.world.disk(), happen)

    def _locate(self, known: LeaderLocation) -> LeaderLocation:
        return locate(self.election.config, self.world.records.situation(known.round), known)

    def _read_campaign(self) -> CampaignRecords:
        records = self.world.records
        return CampaignRecords(records.newest_epoch() or 0, records.situation())

    def _answered(self, number: int, answer: Answer | None, wire: Wire | None) -> None:
        if wire is None:
            if number not in self._cancelled and answer is not None:
                self.handle(events.LinkFailed(number, answer, answer.value))
        elif number in self._cancelled:
            wire.close_by_member()
        elif wire.lost:
            wire.close_by_member()
            # What closes a connection before it has proved anything may be another program (runner.py, ForeignError).
            self.handle(events.LinkFailed(number, Answer.SILENT, Answer.SILENT.value))
        else:
            self.links[number] = wire
            wire.number = number
            self.handle(events.LinkOpened(number, wire.leader.endpoint, wire.epoch))

    # The workers.

    def _join(self) -> None:
        if self.trains:
            ran = STEPPED if self.stepped else 0.0
            self.handle(events.Join(replace(self._candidate, ran=ran, proven=self.has_stepped)))

    def _stop_workers(self, then: Callable[[], None]) -> None:
        if not self._stopping:
            self._stopping = True
            self.later(self.rng.random() * STOP, self._stopped, then)

    def _stopped(self, then: Callable[[], None]) -> None:
        self._stopping, self.workers = False, None
        if self.leaving and then == self._join:
            then = self._goodbye
        then()

    def fail(self, ran: float = STEPPED) -> None:
        """Say that a worker failed by itself, and wait until the round is over."""
        if self.workers is not None and self.election.follower.running and not self._stopping:
            failure = WorkerFailure(self.name, self.name, self.position, 1, ran=ran)
            self.handle(events.SendToLeader(WorkerFailed(self.name, self.workers, failure)))

    def _work(self, round_: int, nodes: int) -> None:
        """The workers of a round are ready: they fail, or take a step once all are."""
        if self.workers != round_ or self._stopping:
            return
        if nodes in self.world.unusable:
            self.fail(ran=0.1)
        else:
            self.world.checks.after_work(round_)

    def leave(self, seconds: float) -> None:
        """Announce it, let the workers run on for so long unless they are stopped, say goodbye."""
        if self.leaving:
            return
        self.leaving = True
        self.handle(events.SendToLeader(Leaving(self.name, LeaveReason.PREEMPTED)))
        if not self.trains:
            self._wait_for_successor(self.world.now + GRACE)
            return
        self.later(seconds if self.workers is not None else 0.0, lambda: self._stop_workers(self._goodbye))

    def _wait_for_successor(self, until: float) -> None:
        if not isinstance(self.election.campaign, Leading) or self.world.now >= until:
            self.end(silent=False)
        else:
            self.later(NAP, lambda: self._wait_for_successor(until))

    def _goodbye(self) -> None:
        if self._said_goodbye:
            return
        self._said_goodbye = True
        self.handle(events.SendToLeader(Left(self.name, LeaveReason.PREEMPTED)))
        # A leader that leaves has some time for its successor.
        self.later(0.05 if self.leader is None else 5.0, lambda: self.end(silent=False))

    def _hear(self, event: events.LeaderEvent) -> None:
        match event:
            case Assignment(round=round_, nodes=nodes):
                self.workers, self.stepped = round_, False
                if self.world.unusable:
                    self.later(0.1 + 0.3 * self.rng.random(), self._work, round_, nodes)
                self.world.checks.after_start(self, event)
            case Interrupted():
                self._stop_workers(self._join)
            case events.LeaderLost() | events.Unreachable():
                self.end(silent=False)
            case Waiting():
                pass  # a spare
            case _:
                raise AssertionError(event)

    # Links.

    def break_link(self) -> None:
        """The link to the leader breaks."""
        link = self.election.link
        wire = self.links.pop(link.number, None) if link is not None else None
        if link is not None and wire is not None:
            wire.close_by_member()
            self.handle(events.LinkClosed(link.number))

    def hear_member(self, wire: Wire, message: object) -> None:
        """Take what came up a wire."""
        if self.leader is None or self.leader is not wire.served_by:
            wire.close_by_leader()
        elif isinstance(message, Closed):
            self.leader.lose(wire)
        else:
            self.leader.hear(wire, message)  # type: ignore[arg-type]

    def hear_leader(self, wire: Wire, message: LeaderMessage | Closed) -> None:
        """Take what came down a wire."""
        if self.links.get(wire.number) is not wire:
            return
        if isinstance(message, Closed):
            del self.links[wire.number]
            wire.close_by_member()
            self.handle(events.LinkClosed(wire.number))
        else:
            link = self.election.link
            if link is not None and link.number == wire.number:
                self.last_message_at = self.world.now
            self.handle(events.Received(wire.number, message))
