"""An agent and its workers: the real protocol of the agent, around a model of what can happen on a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from slurm_elastic.agent.lifecycle.states import Departure, LifecycleConfig, depart
from slurm_elastic.rendezvous.election.follower import Follower
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import STEPPED, AgentInfo, LeaveReason, WorkerFailure
from slurm_elastic.rendezvous.transport.messages import AgentMessage
from tests.simulation.network import Connection, Hello, Place, Welcome
from tests.simulation.process import HeardProcess
from tests.simulation.workers import UNUSABLE, Workers

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimulatedAgent(HeardProcess):
    """One agent's process, its workers and its link.

    Attributes:
        over: whether it was told that the run has ended.
        workers: the round whose workers exist here, None when there are none. The truth, not what anybody believes.
        done: the last round whose workers ended well here.
        stepping: these workers, as long as they are neither stopped nor failed.
        leaving: why it goes, once it has announced it.
        has_failed: whether a worker has failed in the round that it was placed in last.
        answered: the last probe that it answered.
    """

    def __init__(
        self, world: World, candidate: AgentInfo, *, takes_part: bool = True, ready_after: float = 0.0
    ) -> None:
        super().__init__(world, candidate.agent)
        self.node = candidate.node
        self.follower = Follower(self.name, coming=True)
        self.over = False
        self.workers: int | None = None
        self.stepping: Workers | None = None
        self.done: int | None = None
        self.leaving: LeaveReason | None = None
        self.answered = 0
        self.candidate = candidate
        self._connection: Connection | None = None
        self._pending: Connection | None = None
        self.has_failed = self._stopping = self._lingering = False
        self._takes_part = takes_part
        self._serves_store = False
        self._ran = 0.0
        self._departure: Departure | None = None
        self._joins_by_itself = self.rng.random() < 0.5
        self.connect()
        if ready_after:
            self.later(ready_after, self._join_first)
        else:
            self._join()

    # The link.

    def connect(self) -> None:
        """Make a connection, beside the one that is there if there is one."""
        if self.alive and self._pending is None:
            self._pending = Connection(self.world, self)
            self._pending.send_up(Hello())

    def receive(self, connection: Connection, message: object) -> None:
        """Take what came over a connection; None when it has ended."""
        self.do(self._read, connection, message)

    def last_beat(self, connection: Connection) -> float:
        """When the last sign of life was sent over this connection."""
        if connection is not self._connection or connection.ended:
            return 0.0
        return self.beat()

    def well_since(self) -> float:
        """Since when it can be heard without interruption; now, if it cannot."""
        connected = self._connection is not None and not self._connection.ended
        return self._heard_again_at if connected and self._mute_since is None else self.world.now

    def break_connection(self, *, noticed: bool) -> None:
        """Lose the connection, and with it what is under way."""
        connection = self._connection or self._pending
        if connection is not None:
            connection.break_(noticed=noticed)

    def cut_link(self) -> None:
        """The network carries nothing any more."""
        self.cut = True
        self._fall_mute()

    def heal_link(self, afterwards: str) -> None:
        """The network is whole again."""
        self.cut = False
        self._be_heard_again()
        if afterwards == "breaks":
            self.break_connection(noticed=True)
        elif afterwards == "is replaced":
            self.connect()
        for connection in (self._connection, self._pending):
            if connection is not None:
                connection.release()

    def _read(self, connection: Connection, message: object) -> None:
        if connection is self._pending:
            if message is None:
                self._pending = None
                self._connect_soon()
            elif isinstance(message, Welcome):
                self._use(connection)
            return
        if connection is not self._connection:
            return
        match message:
            case None:
                self._connection = None
                if self._pending is None:
                    self._connect_soon()
            case messages.Probed(probe):
                self.answered = probe
                self._say(messages.Ponged(self.name, probe))
            case Place():
                self._take(message)
            case messages.Holding(round=round_):
                if self.follower.holding(round_):
                    self._hold(round_)
            case messages.Stopping(round=round_, step=step):
                self._stop_at(round_, step)
            case messages.Interrupted(round=round_):
                self._interrupt(round_)
            case messages.Ended():
                self.over = True
                self._stop_workers(self._vanish)

    def _use(self, connection: Connection) -> None:
        older, self._connection, self._pending = self._connection, connection, None
        if older is not None:
            older.close_by_agent()
        self._heard_again_at = self.world.now
        self.follower, greeting = self.follower.greet(self.world.now)
        for message in greeting:
            self._say(message)

    def _connect_soon(self) -> None:
        self.later(self.rng.random() * self.rng.choice((0.02, 0.05, 0.05, 0.5)), self.connect)

    def _tell(self, message: AgentMessage) -> None:
        self.follower = self.follower.told(message, self.world.now)
        self._say(message)

    def _say(self, message: object) -> None:
        if self._connection is not None:
            self._connection.send_up(message)

    # The protocol.

    def _join(self) -> None:
        self.candidate = replace(self.candidate, store_port=self.candidate.store_port + 1, ran=self._ran)
        self.follower, joined = self.follower.join(self.candidate)
        self._say(joined)

    def _join_first(self) -> None:
        if self.leaving is None and not self.over:
            self._join()

    def _take(self, message: Place) -> None:
        placed = self.follower.placed(message.attempt, message.table.round)
        if placed is not None:
            self.follower = placed
            self.workers = message.table.round
            self.has_failed = False
            self._ran = 0.0
            places = message.table.places
            self._serves_store = len(places) > 1 and places[0].agent == self.name
            group = self.world.group(message.table)
            self.stepping = Workers(self, group, takes_part=self._takes_part, stopped=self._have_stopped)
            self.world.checks.after_place(self, message.table)
            if self.world.completing:
                self.complete_soon()

    def _interrupt(self, round_: int) -> None:
        if self.follower.interrupted(round_):
            self.follower = self.follower.note_over()
            if self._lingering:
                self._vanish()
            else:
                self._stop_workers(self._join)
        elif self.follower.candidate is not None:
            self._join()

    # The planned end of a round.

    def leave(self, reason: LeaveReason, seconds: float | None) -> None:
        """Announce it, stop the workers where all do, or by force before the time is up, and say goodbye."""
        if self.over or self.leaving is not None:
            return
        self.leaving = reason
        timeout = 4.0 if seconds is None else seconds
        margin, now = self.world.schedule.settings.leave_margin, self.world.now
        config = LifecycleConfig("", "", "", "", shutdown_timeout=timeout, leave_margin=margin)
        self._departure = depart(config, reason, "", seconds, now)
        self._tell(messages.Leaving(self.name, reason, timeout))
        self.world.at(now + max(timeout, 2.0) + 1e-6, self.world.checks.after_deadline, self)
        if self._stopping:
            # Workers that are being stopped already have no more time than others.
            self.later(max(0.0, self._departure.gone_by - now), self._stopped, self._goodbye)
        if self.workers is None or self.has_failed:
            self.later(self.rng.random() * 0.3, self._stop_workers, self._goodbye)
        else:
            self.later(self._departure.stop_by - now, self._force)

    def _hold(self, round_: int) -> None:
        if self._stopping:
            self._say(messages.Held(self.name, round_, None))
        elif self.stepping is not None:
            step = self.stepping.hold()
            self.world.checks.after_answer(self, self.stepping, step, takes_part=self._takes_part)
            self._say(messages.Held(self.name, round_, step))

    def _stop_at(self, round_: int, step: int) -> None:
        told = self.follower.stop
        stopping = self.follower.stopping(round_, step)
        if stopping is not None:
            self.follower = stopping
            if told is None and self.stepping is not None and not self._stopping:
                self.stepping.stop_at(step)

    def _force(self) -> None:
        if self.workers is not None and not self._stopping and self.follower.last_round is not None:
            self._say(messages.Held(self.name, self.follower.last_round, None))
        if not self._lingering:
            self._stop_workers(self._goodbye)
        else:
            self._vanish()

    def _have_stopped(self) -> None:
        """The workers have saved and ended; the agent takes note unless it hangs."""
        self._end_workers()
        self.workers = None
        self.later(0.0, self._noticed_stop)

    def _noticed_stop(self) -> None:
        if self._stopping or self.over:
            return
        if self.leaving is None:
            self.follower = replace(self.follower, running=False)
            self._join()
            return
        self._tell(messages.Left(self.name, self.leaving, stopped=True))
        if self._serves_store:
            self._lingering = True
        else:
            self._vanish()

    def _end_workers(self) -> None:
        if self.stepping is not None:
            self._ran = self.stepping.ran()
            self.stepping.end()
            self.stepping = None

    def _goodbye(self) -> None:
        self._tell(messages.Left(self.name, self.leaving or LeaveReason.FINISHED))
        self._vanish()

    def close_run(self) -> None:
        """Close the run for everybody."""
        self._tell(messages.Closed(self.name))

    # The workers.

    def fail(self, cause: str, round_: int | None = None) -> None:
        """A worker fails, if there are any (of this round) that still run."""
        if self.workers is None or self.has_failed or self._stopping or round_ not in (None, self.workers):
            return
        self.has_failed = True
        ran = self.stepping.ran() if self.stepping is not None else 0.0
        self._end_workers()
        self.world.checks.after_failure(self, self.workers, cause)
        if self.leaving is not None:
            self.world.break_collectives(self, self.workers, cause)
            self._force()
            return
        own, seed = cause in ("by itself", UNUSABLE), self.world.schedule.seed
        if own and ran < STEPPED:
            self._ran = 0.0
        failure = WorkerFailure(
            self.name,
            self.candidate.node,
            0,
            1,
            cause,
            # Some do not say that they are a consequence, and some that fail do so in the same way.
            consequence=not own and seed % 2 == 0,
            fingerprint="the same" if own and (seed + self.workers) % 3 else "",
            ran=max(ran, 0.1) if self.world.groups[self.workers].unusable else STEPPED,
        )
        self._tell(messages.WorkerFailed(self.name, self.workers, failure))
        if cause != UNUSABLE:
            self.world.break_collectives(self, self.workers, cause)
        if self._joins_by_itself:
            self._stop_workers(self._join)

    def complete(self, *, goes: bool) -> None:
        """The workers end well, if there are any and nothing has happened to them."""
        if self.workers is None or self.has_failed or self._stopping or self.leaving is not None:
            return
        if self.stepping is None or self.stepping.waiting or self.stepping.saving:
            # They have not come to their end yet.
            if self.world.completing:
                self.complete_soon()
            return
        self.stepping.group.part(self.stepping)
        self._end_workers()
        self.done, self.workers = self.workers, None
        self._tell(messages.Finished(self.name, self.done))
        if goes:
            self._goodbye()

    def complete_soon(self) -> None:
        """The workers are nearly done; nothing happens to them any more."""
        self.later(self.rng.random() * 0.5, lambda: self.complete(goes=False))

    def _stop_workers(self, then: Callable[[], None]) -> None:
        if self._stopping:
            return
        self._stopping = True
        noise = self.world.noise
        longest = noise.long_stop if self.rng.random() < 0.1 else noise.stop
        seconds = self.rng.random() * longest if self.workers is not None else 0.0
        if self._departure is not None:
            seconds = max(0.0, min(seconds, self._departure.gone_by - self.world.now))
        self._end_workers()
        self.later(seconds, self._stopped, then)
        if self.workers is not None and not self.world.groups[self.workers].unusable:
            self.world.break_collectives(self, self.workers, "a peer stopped")

    def _stopped(self, then: Callable[[], None]) -> None:
        self.workers = None
        self._stopping = False
        self.follower = replace(self.follower, running=False)
        if self.over:
            then = self._vanish
        elif self.leaving is not None:
            then = self._goodbye
        then()

    # The process.

    def lose_workers(self) -> None:
        """The workers are killed, a moment before the agent is, which may still say so."""
        if self.workers is not None:
            self.world.checks.after_ragged_death(self, self.workers)
            self._end_workers()
            if self.rng.random() < 0.5:
                self.later(self.rng.random() * 0.01, self.fail, "the node died", self.workers)
            self.world.break_collectives(self, self.workers, "the node died")

    def die(self, *, silent: bool) -> None:
        """The process and its workers end at once."""
        if not self.alive:
            return
        self.alive = False
        for connection in (self._connection, self._pending):
            if connection is not None and silent:
                connection.go_silent()
            elif connection is not None:
                connection.break_(noticed=True)
        self._end_workers()
        if self.workers is not None:
            round_, self.workers = self.workers, None
            self.world.break_collectives(self, round_, "the node died")

    def _vanish(self) -> None:
        self.alive = False
        if self._connection is not None:
            self._connection.close_by_agent()
        if self._pending is not None:
            self._pending.close_by_agent()
