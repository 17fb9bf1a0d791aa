"""An agent in virtual time: its workers, its link to the leader, and its chair."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.ledger import Ledger, last_round
from slurm_elastic.rendezvous.membership import (
    Candidate,
    Hold,
    Interrupt,
    LeaveReason,
    Ponged,
    Probe,
    Reason,
    Resign,
    Settings,
)
from slurm_elastic.rendezvous.participant import Participant
from slurm_elastic.rendezvous.succession import FENCE, default_leader_limit, patience
from tests.simulation.succession.leading import Beat, Leading, Placed
from tests.simulation.succession.wire import Closed, Wire

if TYPE_CHECKING:
    from tests.simulation.succession.world import World

__all__ = ["SCOPE", "Party"]

SCOPE = "run.0"
STOP = 0.5
RESTORE = 0.1
UNLED = 10.0


class Party:
    """One agent.

    Attributes:
        alive: whether its process exists.
        refuses: once it does not: whether its node tells others so.
        paused: whether the process does nothing for a while.
        workers: the round whose workers exist here. The truth, not what anybody believes.
        leading: the leader that runs here, with or without an epoch of its own.
    """

    def __init__(self, world: World, name: str, node: str, position: int) -> None:
        self.world, self.name, self.node = world, name, node
        self.rng = random.Random(f"{world.seed} {name}")
        self.alive, self.refuses, self.paused, self.leaving = True, True, False, False
        self.workers: int | None = None
        self.members: tuple[str, ...] = ()
        self.leading: Leading | None = None
        self.participant = Participant(name)
        self._candidate = Candidate(name, node, position, 1, "trainer", name, 20000, standby_port=1)
        self._stopping = False
        self._postponed: list[Callable[[], None]] = []
        # What it knows of leaders.
        self.wire: Wire | None = None
        self._heard_at = world.now
        self._epoch = 0
        self._leader = ""
        self._order: list[str] = []
        self._fenced: int | None = None
        self._resigned = False
        self._left = ""
        # One search.
        self._began: float | None = world.now
        self._lost_at: float | None = None
        self._again = False
        self._answers: dict[str, str] = {}
        self._trying: dict[str, float] = {}
        self._stand_again_at = self._rivals_at = 0.0
        self._join()
        self._tick()

    # The process.

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.world.at(self.world.now + seconds, self._do, action)

    def _do(self, action: Callable[[], None]) -> None:
        if self.alive and self.paused:
            self._postponed.append(action)
        elif self.alive:
            action()

    def go_on(self) -> None:
        """End a pause."""
        self.paused = False
        postponed, self._postponed = self._postponed, []
        for action in postponed:
            self._do(action)
        self.world.carry_on()

    def end(self, *, silent: bool) -> None:
        """The process and its workers end at once; with its node, nobody is told."""
        if not self.alive:
            return
        self.alive, self.workers, self.refuses = False, None, not silent
        if self.leading is not None:
            self.leading.end(told=not silent)
        if self.wire is not None:
            self.wire.close_by_member(told=not silent)

    # The workers.

    def _join(self) -> None:
        self.participant, joined = self.participant.join(self._candidate)
        self._say(joined)

    def _stop_workers(self, then: Callable[[], None]) -> None:
        if not self._stopping:
            self._stopping = True
            self.later(self.rng.random() * STOP, lambda: self._stopped(then))

    def _stopped(self, then: Callable[[], None]) -> None:
        self._stopping, self.workers = False, None
        self.participant = self.participant.stopped()
        if self.leaving and then == self._join:
            then = self._goodbye
        then()

    def leave(self) -> None:
        """Announce it, stop the workers, say goodbye."""
        if not self.leaving:
            self.leaving = True
            self.participant, leaving = self.participant.leaving(LeaveReason.PREEMPTED, None, self.world.now)
            self._say(leaving)
            self.later(self.rng.random() * 1.0, lambda: self._stop_workers(self._goodbye))

    def _goodbye(self) -> None:
        self.participant, left = self.participant.left(LeaveReason.PREEMPTED, stopped=False)
        self._say(left)
        # A leader that leaves has some time for its successor.
        self.later(0.05 if self.leading is None else 5.0, lambda: self.end(silent=False))

    def _fence(self, why: str) -> None:
        round_ = self.participant.last_round
        if self.participant.running and round_ is not None and self._fenced != round_:
            self._fenced = round_
            self.world.tell(self.name, f"stops by itself: {why}")
            self._stop_workers(self._join)

    # The link.

    def _say(self, message: object) -> None:
        if self.wire is not None:
            self.wire.send_up(message)

    def hear_member(self, wire: Wire, message: object) -> None:
        """Take what came up a wire."""
        if self.leading is None or self.leading is not wire.served_by:
            wire.close_by_leader()
        elif isinstance(message, Closed):
            self.leading.lose(wire)
        else:
            self.leading.hear(wire, message)

    def hear_leader(self, wire: Wire, message: object) -> None:
        """Take what came down a wire."""
        if wire is not self.wire:
            return
        if isinstance(message, Closed):
            self._drop()
            return
        self._heard_at = self.world.now
        match message:
            case Beat():
                self._say(Beat())
            case Probe(_, probe):
                self._say(Ponged(self.name, probe))
            case Hold(_, round_):
                self._say(self.participant.held(round_, None))
            case Placed():
                self._take(message)
            case Interrupt(_, round_):
                if self.participant.interrupted(round_):
                    self._stop_workers(self._join)
                elif self.participant.candidate is not None:
                    self._join()
            case Resign():
                self._resigned, self._left = True, wire.leader.name
            case _:
                raise AssertionError(message)

    def _take(self, message: Placed) -> None:
        placed = self.participant.placed(message.attempt, message.table.round)
        if placed is None:
            return
        self.participant = placed
        self._epoch, self._leader = message.epoch, message.leader
        self.members = tuple(place.agent for place in message.table.places)
        self._order = [name for name in self.members if name != message.leader]
        self.workers = message.table.round
        self.world.checks.after_start(self, message.table)

    def _drop(self) -> None:
        """The link is of no more use: look for another."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close_by_member()
        self._began, self._again, self._answers, self._trying = self.world.now, True, {}, {}
        self._lost_at = self.world.now if self._resigned else None

    def _use(self, wire: Wire) -> None:
        self.wire, self._began, self._resigned = wire, None, False
        self._heard_at = self.world.now
        self.participant, greeting = self.participant.greet(self.world.now)
        for message in greeting:
            self._say(message)

    # Time, and the search for a leader: as in slurm_elastic/rendezvous/finder.py.

    def _tick(self) -> None:
        if self.leading is not None:
            self.leading.tick()
        if self.wire is not None:
            self._watch()
        elif not self.leaving or self.participant.running:
            self._search()
        if self.leading is not None and not self.leading.state.claimed and self.world.now >= self._rivals_at:
            self._rivals_at = self.world.now + 0.5
            self._look_for_rivals()
        self.later(0.03 + 0.04 * self.rng.random(), self._tick)

    def _watch(self) -> None:
        limit = self.world.limit
        silence = self.world.now - self._heard_at
        if silence > default_leader_limit(limit):
            self._drop()
        elif silence >= FENCE * limit:
            self._fence("the leader is silent")

    def _search(self) -> None:
        now, began = self.world.now, self._began
        assert began is not None
        if self._again and now >= began + RESTORE:
            self._fence("the link is broken")
        published = self.world.records.endpoint()
        last = last_round(self.world.records.situation(), SCOPE)
        order = self._order or ([each.agent for each in last.successors] if last is not None else [])
        place = str(published["agent"]) if published is not None else ""
        if self._lost_at is None:
            self._lost_at = self._when_lost(place)
        if self.leading is not None:
            places = [self.name]
        else:
            places = [name for name in (self._leader if self._again else "", place) if name and name != self._left]
            if self._lost_at is not None or now > began + RESTORE:
                places += [name for name in order if name != self.name]
        for name in dict.fromkeys(places):
            if now >= self._trying.get(name, 0.0):
                self._trying[name] = now + 60.0
                self.world.attempt(self, name, lambda answer, wire, name=name: self._answered(name, answer, wire))
        gone = {name for name, answer in self._answers.items() if answer == "ended"}
        if self._lost_at is not None and now >= self._lost_at + patience(order, self.name, gone):
            if self._resigned:
                gone.add(self._left)
            self._stand(gone)

    def _when_lost(self, place: str) -> float | None:
        now = self.world.now
        lost = {name for name, answer in self._answers.items() if answer in ("ended", "idle")}
        assert self._began is not None
        if self._again:
            silent = now > self._heard_at + default_leader_limit(self.world.limit)
            return now if self._leader in lost or silent else None
        if not place:
            return now if now > self._began + UNLED else None
        return now if place in lost or now > self._began + default_leader_limit(self.world.limit) else None

    def _answered(self, name: str, answer: str, wire: Wire | None) -> None:
        self._answers[name] = answer
        self._trying[name] = self.world.now + (0.03 if answer == "idle" else 0.3)
        if wire is None:
            return
        if self.wire is not None or wire.epoch < self._epoch or wire.leader.leading is None:
            wire.close_by_member()
        else:
            self._use(wire)

    def _stand(self, gone: set[str]) -> None:
        if self.leading is not None or self.leaving or self.world.now < self._stand_again_at:
            return
        self._stand_again_at = self.world.now + 1.0
        reason = Reason.NODE_LEFT if self._resigned else Reason.NODE_LOST

        def stand() -> None:
            if self.leading is None and self.wire is None:
                self.world.tell(self.name, "stands")
                self.lead(gone, reason)

        self.later(self.world.disk(), stand)

    def lead(self, gone: set[str], reason: Reason) -> None:
        """Stand, as in slurm_elastic/rendezvous/seat.py."""
        records = self.world.records
        epoch = (records.newest_epoch() or 0) + 1
        last = last_round(records.situation(), SCOPE)
        settings = Settings(
            min_nodes=1,
            max_nodes=16,
            agent=self.name,
            first_round=0 if last is None else last.round + 1,
            first_reason=reason,
            base=last.base if last is not None else None,
            gone=frozenset(gone),
            claimed=False,
            join_timeout=1000.0,
            heartbeat_limit=self.world.limit,
        )
        endpoint = {"agent": self.name, "epoch": epoch}
        ledger = Ledger(records, SCOPE, epoch, endpoint, last.round if last is not None else None)
        self.leading = Leading(self.world, self, epoch, settings, ledger)

    def _look_for_rivals(self) -> None:
        published = self.world.records.endpoint()
        ahead = self._order[: self._order.index(self.name)] if self.name in self._order else self._order
        places = [str(published["agent"])] if published is not None else []
        for name in dict.fromkeys([*places, *ahead]):
            if name not in (self.name, self._left):
                self.world.attempt(self, name, self._found_rival)

    def _found_rival(self, answer: str, wire: Wire | None) -> None:
        if wire is not None:
            wire.close_by_member()
            if self.leading is not None and not self.leading.state.claimed and wire.leader.leading is not None:
                self.world.tell(self.name, f"stands down for {wire.leader.name}")
                self.leading.end()
