"""The process that copies snapshots to other nodes: what `ReplicatorProcess` starts, and its two sides of a copy."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from slurm_elastic.rendezvous.transport.session import SessionError
from slurm_elastic.snapshot._child_process import ignore_signals
from slurm_elastic.snapshot.hand_over import receive, send
from slurm_elastic.snapshot.lineage import REPLICA_SLOTS, Holder, Protection, SnapshotId
from slurm_elastic.snapshot.memory import Contents, OutOfMemoryError, Slot, copies_in, require_memory
from slurm_elastic.snapshot.replication import (
    Goal,
    Report,
    kept_step,
    link_problem,
    newest_of,
    next_goal,
    partners,
    slot_for_replica,
)
from slurm_elastic.snapshot.replicator import Ended, Members, News, Slots, Wanted
from slurm_elastic.snapshot.transfer import (
    Channel,
    Ready,
    Settings,
    TransferError,
    bodies_of,
    connect,
    find_replicator,
    serve,
)

logger = logging.getLogger("slurm_elastic")

_TURN = 0.02
"""Seconds between reports of an agent in a small round."""
_SLOW_TURN = 0.1
"""The same where nothing is copied to other nodes."""
_STALLED = 3.0
"""Seconds without progress after which the other agent is given up for now."""


def main(descriptor: int, listening: int) -> None:
    """Carry out orders until the agent has ended."""
    ignore_signals()
    agent, listener = socket.socket(fileno=descriptor), socket.socket(fileno=listening)
    if (received := receive(agent, Settings)) is not None:
        _Replicator(received[0], agent, listener).run()
    # Threads that send or receive hold nothing that lasts.
    os._exit(0)


class _Collector:
    """The reports of the agents of a round, if this one is its collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round, self._goal = -1, Goal()
        self._reports: dict[int, Report] = {}
        self._partners: dict[int, int] | None = None
        """Who holds whose copies, by rank; None before all agents of the round have reported."""

    def report(self, hello: _Hello) -> _Answer | None:
        """Take a report; returns the goal and the agent that takes copies. None if a newer round has started."""
        members, group = hello.members, hello.members.group
        with self._lock:
            if members.round < self._round:
                return None
            if members.round > self._round:
                self._round, self._goal, self._reports, self._partners = members.round, Goal(), {}, None
            self._reports[group.rank] = hello.report
            self._goal = next_goal(self._goal, self._reports, group.nodes, replicates=members.replicates)
            if self._partners is None and members.replicates and len(self._reports) == group.nodes:
                self._partners = partners(self._reports)
            rank = (self._partners or {}).get(group.rank)
            return _Answer(self._goal, None if rank is None else self._reports[rank])


class _Hello(msgspec.Struct, frozen=True, tag=True):
    members: Members
    report: Report


class _Answer(msgspec.Struct, frozen=True):
    goal: Goal
    partner: Report | None


class _Push(msgspec.Struct, frozen=True, tag=True):
    """A part that comes; or, without one, that no more of the round comes."""

    round: int
    local_rank: int = 0
    contents: Contents | None = None
    safe: SnapshotId | None = None


class _Replicator:
    """The process."""

    def __init__(self, settings: Settings, agent: socket.socket, listener: socket.socket) -> None:
        self.settings, self._agent, self._listener = settings, agent, listener
        self.port: int = listener.getsockname()[1]
        self._news_lock = threading.Lock()
        self._lock = threading.Lock()
        self._replicas: dict[int, list[Slot]] = {}
        self._collector = _Collector()
        self._received: dict[int, threading.Event] = {}
        """By round: set when no more comes from the other agent."""
        self._last_byte = 0.0
        self._taking: dict[int, threading.Lock] = {}
        self._side: _Side | None = None
        self._problem = ""
        self.said_slow = False
        """True if a person has been told that copies are slow: once in the life of the agent."""

    def run(self) -> None:
        """Carry out orders until the agent has ended."""
        serving = self._listener, self.port, self.settings, self._attend
        threading.Thread(target=serve, args=serving, daemon=True).start()
        while (received := receive(self._agent, Members | Slots | Wanted | Ended)) is not None:
            (order, slots), side = received, self._side
            if isinstance(order, Members):
                if side is not None:
                    # The workers of the new round write these slots.
                    side.shared = []
                self._side = side = _Side(self, order, slots)
                threading.Thread(target=self._take_part, args=(side,), daemon=True).start()
            elif side is not None:
                match order:
                    case Slots(local_rank):
                        side.banks[local_rank] = slots
                    case Wanted():
                        side.wanted = True
                    case Ended(moves):
                        side.ended.set()
                        if moves:
                            threading.Thread(target=self._await_source, args=(side,), daemon=True).start()
                        else:
                            side.abandon()

    def tell(self, news: News, slots: Sequence[Slot] = ()) -> None:
        """Tell the agent something."""
        with self._news_lock, contextlib.suppress(OSError):
            send(self._agent, news, slots)

    # The agent's own part in a round.

    def _take_part(self, side: _Side) -> None:
        try:
            side.run()
        finally:
            side.close()
            self.tell(News(sent=side.members.round))

    def _await_source(self, side: _Side) -> None:
        received, self._last_byte = self._end_of_source(side.members.round), time.monotonic()
        while side.has_others and not received.is_set() and time.monotonic() < self._last_byte + self.settings.silence:
            received.wait(0.05)
        self.tell(News(received=side.members.round))

    def _end_of_source(self, round_: int) -> threading.Event:
        with self._lock:
            return self._received.setdefault(round_, threading.Event())

    def say_problem(self, problem: str) -> None:
        """Have the agent log a problem, once."""
        if problem != self._problem:
            self._problem = problem
            self.tell(News(problem=problem))

    # What other agents send.

    def _attend(self, channel: Channel) -> None:
        source: int | None = None
        # An agent whose workers make long steps says nothing for as long.
        channel.socket.settimeout(None)
        try:
            while True:
                push = channel.next(_Hello | _Push)
                if isinstance(push, _Hello):
                    self._answer_report(channel, push)
                    continue
                source = push.round
                self._last_byte = time.monotonic()
                if push.contents is None:
                    self._end_of_source(push.round).set()
                else:
                    self._take(channel, push, push.contents)
        except OutOfMemoryError as error:
            self.say_problem(f"this node takes no copies from another one: {error}")
        finally:
            if source is not None:
                # An agent that was lost sends nothing more.
                self._end_of_source(source).set()

    def _answer_report(self, channel: Channel, hello: _Hello) -> None:
        answer = self._collector.report(hello)
        if answer is None:
            raise TransferError("a round that is over")
        channel.say(answer)

    def _take(self, channel: Channel, push: _Push, contents: Contents) -> None:
        with self._lock:
            side, taking = self._side, self._taking.setdefault(push.local_rank, threading.Lock())
        if side is None or not side.members.replicates or {side.members.round} != {push.round, contents.copy.id.round}:
            raise TransferError("a part of another round")
        if not taking.acquire(blocking=False):
            raise TransferError("another part is on its way")
        try:
            self._take_alone(channel, push, contents, side)
        finally:
            taking.release()

    def _take_alone(self, channel: Channel, push: _Push, contents: Contents, side: _Side) -> None:
        with self._lock:
            slots = self._replicas.get(push.local_rank)
            if slots is None:
                slots = self._replicas[push.local_rank] = [Slot.make() for _ in range(REPLICA_SLOTS)]
                self.tell(News(replicas=push.local_rank), slots)
        copies = copies_in(slots)
        if contents.copy in copies:
            channel.say(Ready(copied=True))
            return
        slot = slots[slot_for_replica(copies, newest_of(push.safe, side.protection().safe))]
        if slot.busy:
            raise TransferError("its slot is being written to disk")
        if not contents.is_possible:
            raise TransferError("a part without sizes")
        require_memory(contents.size + contents.description, slots)

        def heard() -> None:
            self._last_byte = time.monotonic()

        channel.receive_body(slot, contents, bodies_of(contents), heard)
        channel.say(Ready(copied=True))


class _Side:
    """The part of this agent in a round: reports, protects, sends."""

    def __init__(self, owner: _Replicator, members: Members, shared: list[Slot]) -> None:
        self._owner, self.members, self.shared = owner, members, shared
        """With the slots for the state of all ranks; none when another round has started."""
        self.ended = threading.Event()
        """Set when the workers have ended."""
        self.banks: dict[int, list[Slot]] = {}
        """Those for the parts of each local rank."""
        self._goal = Goal()
        self.partner: Report | None = None
        """The agent that takes copies; None before all agents of the round have reported, or if it has no other."""
        self.wanted = False
        """True if the next step that becomes safe is to be written to disk."""
        self._copied: int | None = None
        self._pause_until = 0.0
        self._sending = 0.0
        """Seconds in which the present copy has used the network."""
        self._failing_since: float | None = None
        self._collector: Channel | None = None
        self._target: tuple[Holder, Channel] | None = None
        self._abandoned = False

    def run(self) -> None:
        """Take part until the workers have ended, and send what is newest then."""
        turn = (_TURN if self.members.replicates else _SLOW_TURN) * max(1.0, self.members.group.nodes / 32)
        last = None
        while not self._abandoned and (not self.ended.is_set() or self._seeks(last)):
            if self.ended.is_set():
                # In a short round not all agents have reported yet.
                last = last or time.monotonic() + self._owner.settings.silence
            pause = turn
            try:
                self._turn()
            except (OSError, SessionError, TransferError):
                self._drop_collector()
                pause = turn if last else 0.2
            (time.sleep if last else self.ended.wait)(pause)
        if not self._abandoned and self.partner is not None and self._banks():
            with contextlib.suppress(OSError, SessionError, TransferError):
                for local_rank, slots in self._banks().items():
                    newest = newest_of(*(slot.snapshot for slot in slots))
                    if newest is not None and newest.round == self.members.round:
                        self._send(local_rank, slots, newest)
                self._channel_to_partner().say(_Push(self.members.round))

    def abandon(self) -> None:
        """Send nothing more, also of what is on its way; from any thread."""
        self._abandoned = True
        target = self._target
        if target is not None:
            with contextlib.suppress(OSError):
                target[1].socket.shutdown(socket.SHUT_RDWR)

    @property
    def has_others(self) -> bool:
        """True if another agent sends its parts to this one, as far as this one knows."""
        return self.partner is not None or self._seeks(None)

    def _seeks(self, last: float | None) -> bool:
        """Return True if this agent does not know yet to which other one it sends, and can still learn that."""
        group = self.members.group
        alone = group.nodes == 1 or len(self._banks()) < group.workers
        seeks = self.members.replicates and self.partner is None and not alone
        return seeks and (last is None or time.monotonic() < last)

    def close(self) -> None:
        """Let go of the connections."""
        self._drop_collector()
        self._drop_target()

    def _banks(self) -> dict[int, list[Slot]]:
        return dict(self.banks) if self.shared else {}

    def _turn(self) -> None:
        members, settings, shared = self.members, self._owner.settings, self.shared
        banks = self._banks()
        if not shared or len(banks) < members.group.workers:
            return
        groups = (shared, *banks.values())
        protection = self.protection()
        for slots in groups:
            slots[0].protection = protection
        round_ = members.round
        snapshots = [
            [None if (held := slot.snapshot) is None or held.round != round_ else held for slot in slots]
            for slots in groups
        ]
        newest = [max((snapshot.step for snapshot in ids if snapshot is not None), default=None) for ids in snapshots]
        kept, differs = kept_step(protection, snapshots)
        if kept is not None and not differs and self._copied != kept and not self._pauses():
            self._copy(banks, SnapshotId(round_, kept))
        steps = [step for step in newest if step is not None]
        report = Report(
            settings.node,
            Holder(settings.address, self._owner.port),
            min(steps) if len(steps) == len(newest) else None,
            self._goal.take,
            kept,
            differs,
            self._copied,
            self.wanted,
            self._pauses(),
            settings.domain,
        )
        if self._collector is None:
            holder = members.collector
            collector = find_replicator(holder, settings) if members.replicates else holder
            self._collector = connect(collector, settings, _STALLED)
        self._collector.say(_Hello(members, report))
        answer = self._collector.next(_Answer)
        if members.replicates and answer.goal.safe != self._goal.safe and answer.goal.safe is not None:
            self._owner.tell(News(safe=SnapshotId(round_, answer.goal.safe)))
        if answer.goal.disk != self._goal.disk and answer.goal.disk is not None:
            disk = SnapshotId(round_, answer.goal.disk)
            # Before the next report: until then the step is protected, because it is the newest that is safe.
            for slots in groups:
                for slot in slots:
                    if slot.snapshot == disk:
                        slot.busy = True
            self.wanted = False
            self._owner.tell(News(disk=disk))
        self._goal, self.partner = answer.goal, answer.partner

    def protection(self) -> Protection:
        """Return which snapshots are not overwritten, as far as this agent knows."""
        round_, goal = self.members.round, self._goal
        safe = self.members.safe if goal.safe is None else SnapshotId(round_, goal.safe)
        return Protection(safe, None if goal.take is None else SnapshotId(round_, goal.take))

    def _copy(self, banks: dict[int, list[Slot]], snapshot: SnapshotId) -> None:
        if self.members.replicates and self.members.group.nodes > 1 and self.partner is None:
            # All agents are on one node, or have not reported yet.
            return
        began, self._sending = time.monotonic(), 0.0
        if self.partner is not None:
            self._failing_since = self._failing_since or began
            size = 0
            try:
                for local_rank, slots in banks.items():
                    sent = self._send(local_rank, slots, snapshot)
                    if sent is None:
                        return
                    size += sent
            except (OSError, SessionError, TransferError) as error:
                self._say_slow(time.monotonic() - self._failing_since, 0, str(error) or type(error).__name__)
                raise
            self._say_slow(time.monotonic() - began, size)
            self._failing_since = None
        self._copied = snapshot.step
        # At most half of the time: the network is the training's. The other agent makes room before the first copy, for
        # seconds maybe, and does not use the network for that.
        self._pause_until = time.monotonic() + self._sending

    def _pauses(self) -> bool:
        return time.monotonic() < self._pause_until

    def _say_slow(self, seconds: float, size: int, error: str = "") -> None:
        assert self.partner is not None
        problem = link_problem(self.partner.node, seconds, size, error)
        if problem and not self._owner.said_slow and not self._abandoned:
            self._owner.said_slow = True
            self._owner.say_problem(problem)

    def _send(self, local_rank: int, slots: Sequence[Slot], snapshot: SnapshotId) -> int | None:
        """Send a part to the other agent; returns its bytes, None if it is not here, or not whole any more."""
        for slot in slots:
            contents = slot.contents()
            if contents is None or contents.copy.id != snapshot:
                continue
            channel = self._channel_to_partner()
            try:
                channel.say(_Push(self.members.round, local_rank, contents, self.protection().safe))
                if channel.next(Ready).copied:
                    return contents.size
                began = time.monotonic()
                # If it fails the connection ends, and what was sent is not committed.
                channel.send_body(slot, contents, bodies_of(contents))
                channel.next(Ready)
                self._sending += time.monotonic() - began
            except (OSError, SessionError, TransferError):
                self._drop_target()
                raise
            return contents.size
        return None

    def _channel_to_partner(self) -> Channel:
        assert self.partner is not None
        holder = self.partner.holder
        if self._target is None or self._target[0] != holder:
            self._drop_target()
            self._target = holder, connect(holder, self._owner.settings, _STALLED)
        return self._target[1]

    def _drop_collector(self) -> None:
        if self._collector is not None:
            self._collector.socket.close()
            self._collector = None

    def _drop_target(self) -> None:
        if self._target is not None:
            with contextlib.suppress(OSError):
                self._target[1].socket.close()
            self._target = None
