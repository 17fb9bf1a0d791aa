"""An agent in virtual time: its process, its workers, and its link to the leader."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.election.follower import Participant
from slurm_elastic.rendezvous.election.policy import FENCE, default_leader_limit
from slurm_elastic.rendezvous.membership import Candidate, Interrupt, LeaveReason, OnTie, Ponged, Probe, WorkerFailure
from tests.simulation.succession.checks import NAP, STOP
from tests.simulation.succession.leading import Beat, Holding, Leading, Placed, Resigned
from tests.simulation.succession.search import Search
from tests.simulation.succession.wire import Closed, Wire

if TYPE_CHECKING:
    from tests.simulation.succession.world import World

__all__ = ["Party"]

GRACE = 30.0
"""Seconds in which a leader without workers hands over; then it is killed."""
STOOD_STILL = 2 / 3
"""Of the heartbeat limit: who goes on after so much silence notices that it was paused, and gives the leader time."""


class Party:
    """One agent.

    Attributes:
        position: of its node.
        trains: whether it ever has workers; one that does not only leads.
        on_tie: whether it leads on with half of a round; agents may have been told different things.
        alive: whether its process exists.
        refuses: once it does not: whether its node tells others so.
        paused: whether the process does nothing for a while.
        awake_since: when its last pause ended.
        leaving: whether it has announced that it goes.
        workers: the round whose workers exist here. The truth, not what anybody believes.
        leading: the leader that runs here, with or without an epoch of its own.
        wire: its link to a leader.
        heard_at: when something came over that last.
    """

    def __init__(self, world: World, name: str, node: str, position: int, *, trains: bool) -> None:
        self.world, self.name, self.position, self.trains = world, name, position, trains
        self.rng = random.Random(f"{world.seed} {name}")
        self.on_tie = OnTie.NONE if self.rng.random() < 0.15 else OnTie.LEADER
        self.alive, self.refuses, self.paused, self.leaving = True, True, False, False
        self.awake_since = -math.inf
        self.workers: int | None = None
        self.leading: Leading | None = None
        self.wire: Wire | None = None
        self.heard_at = world.now
        self.participant = Participant(name)
        self.search = Search(self)
        self._candidate = Candidate(name, node, position, 1, "trainer", name, 20000, standby_port=1)
        self._stopping = self._said_goodbye = False
        self._postponed: list[Callable[[], None]] = []
        self._look_at = math.inf
        self._join()
        self.wake_at(world.now)

    # The process.

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while, if the process still exists; after a pause if it is paused."""
        self.world.at(self.world.now + seconds, self._do, action)

    def _do(self, action: Callable[[], None]) -> None:
        if self.alive and self.paused:
            self._postponed.append(action)
        elif self.alive:
            action()

    def pause(self) -> None:
        """Do nothing any more."""
        self.paused = True

    def go_on(self) -> None:
        """End a pause."""
        if self.world.now - self.heard_at > STOOD_STILL * self.world.limit:
            # It cannot tell whether the leader was paused, too.
            self.heard_at = self.world.now - self.world.limit / 2
        self.paused, self.awake_since = False, self.world.now
        postponed, self._postponed = self._postponed, []
        for action in postponed:
            self._do(action)
        self.world.checks.after_pause(self)
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

    # Time.

    def wake_at(self, moment: float) -> None:
        """Look at the clock then, or a little later."""
        moment = max(moment, self.world.now)
        if moment < self._look_at:
            self._look_at = moment
            self.later(moment - self.world.now + NAP * self.rng.random(), lambda: self._look(moment))

    def _look(self, moment: float) -> None:
        if moment != self._look_at:
            return
        self._look_at = math.inf
        if self.leading is not None:
            self.leading.tick()
        if self.wire is not None:
            self._watch(self.wire)
        elif not self.leaving or self.participant.running:
            if self.search.is_late():
                self._fence("the link is broken")
            self.search.look()
            self.wake_at(self.world.now + 0.03)
        if self.leading is not None:
            if not self.leading.state.claimed:
                if self.world.now >= self.search.rivals_at:
                    self.search.look_for_rivals()
                self.wake_at(self.search.rivals_at)
            if self.leading is not None:
                self.wake_at(self.leading.next_look())
        self.world.checks.after_look(self)

    def _watch(self, wire: Wire) -> None:
        limit, last = self.world.limit, default_leader_limit(self.world.limit)
        silence = self.world.now - self.heard_at
        if silence > last:
            self.drop(wire)
        elif silence >= FENCE * limit:
            self._fence("the leader is silent")
            self.wake_at(self.heard_at + last)
        else:
            self.wake_at(self.heard_at + FENCE * limit)

    # The workers.

    def _join(self) -> None:
        if self.trains:
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

    def fail(self) -> None:
        """Say that a worker failed by itself, and wait until the round is over."""
        if self.workers is not None and self.participant.running and not self._stopping:
            failure = WorkerFailure(self.name, self.name, self.position, 1)
            self.participant, failed = self.participant.failed(failure)
            self._say(failed)

    def leave(self, seconds: float) -> None:
        """Announce it, let the workers run on for so long unless they are stopped, say goodbye."""
        if self.leaving:
            return
        self.leaving = True
        self.search.leaving.add(self.name)
        self.participant, leaving = self.participant.leaving(LeaveReason.PREEMPTED, None, self.world.now)
        self._say(leaving)
        if not self.trains:
            self._wait_for_successor(self.world.now + GRACE)
            return
        self.later(seconds if self.workers is not None else 0.0, lambda: self._stop_workers(self._goodbye))

    def _wait_for_successor(self, until: float) -> None:
        if self.leading is None or not self.leading.state.claimed or self.world.now >= until:
            self.end(silent=False)
        else:
            self.later(NAP, lambda: self._wait_for_successor(until))

    def _goodbye(self) -> None:
        if self._said_goodbye:
            return
        self._said_goodbye = True
        self.participant, left = self.participant.left(LeaveReason.PREEMPTED, stopped=False)
        self._say(left)
        # A leader that leaves has some time for its successor.
        self.later(0.05 if self.leading is None else 5.0, lambda: self.end(silent=False))

    def _fence(self, why: str) -> None:
        cut_off = self.participant.unheard()
        if cut_off is not None:
            self.participant = cut_off
            self.world.tell(self.name, f"stops by itself: {why}")
            self._stop_workers(self._join)

    # The link.

    def use(self, wire: Wire) -> None:
        """This is the leader."""
        self.wire, self.search.resigned = wire, False
        self.heard_at = self.world.now
        self.participant, greeting = self.participant.greet(self.world.now)
        for message in greeting:
            self._say(message)
        self.wake_at(self.world.now)

    def drop(self, wire: Wire) -> None:
        """The link is of no more use: look for another."""
        if self.wire is wire:
            self.wire = None
            wire.close_by_member()
            self.search.begin()
            self.wake_at(self.world.now)

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
            self.drop(wire)
            return
        self.heard_at = self.world.now
        match message:
            case Beat():
                self._say(Beat())
            case Probe(_, probe):
                self._say(Ponged(self.name, probe))
            case Holding():
                self.search.leaving.update(message.leaving)
                self._say(self.participant.held(message.round, None))
            case Placed():
                self._take(message)
            case Interrupt(_, round_, restarts=restarts):
                self.participant = self.participant.charged(restarts)
                if self.participant.interrupted(round_):
                    self.participant = self.participant.told_over()
                    self._stop_workers(self._join)
                elif self.participant.candidate is not None:
                    self._join()
            case Resigned():
                self.search.resign(wire.leader.name, message.gone)
            case _:
                raise AssertionError(message)

    def _take(self, message: Placed) -> None:
        self.participant = self.participant.charged(message.table.restarts)
        placed = self.participant.placed(message.attempt, message.table.round)
        if placed is not None:
            self.participant = placed
            self.search.placed(message)
            self.workers = message.table.round
            self.world.checks.after_start(self, message.table)
