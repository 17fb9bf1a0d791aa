"""Exchanges snapshots with the other agents of a run, in threads of the agent: sends what they ask for, copies parts.

When a worker saves its first part of a round, a thread begins to take part in it: it reads the headers of the slots
again and again, reports to the collector, says to workers which slots to keep, and sends the parts that become safe to
the agent on another node. When the workers have ended because agents leave, it sends the newest parts. Threads of the
server take what other agents send. All wait or copy without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from slurm_elastic.rendezvous.transport.session import SessionError
from slurm_elastic.snapshot.disk.agent_side import DiskWriter
from slurm_elastic.snapshot.lineage import REPLICA_SLOTS, Group, Holder, Protection, SnapshotId
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
from slurm_elastic.snapshot.transfer import (
    Channel,
    Ready,
    Request,
    Server,
    Settings,
    TransferError,
    bodies_of,
    connect,
    send_requested,
    shut_down,
)

logger = logging.getLogger("slurm_elastic")

_T = TypeVar("_T")

_AT_ONCE = 64
"""Receivers of what they have asked for that are served together; more are sent away and come again."""
_TURN = 0.02
"""Seconds between reports of an agent in a small round."""
_SLOW_TURN = 0.1
"""The same where nothing is copied to other nodes."""
_STALLED = 3.0
"""Seconds without progress after which the other agent is given up for now."""


class Members(msgspec.Struct, frozen=True):
    """The agents of a round, as one of them knows them.

    Attributes:
        collector: The agent that collects reports.
        safe: The snapshot that is kept until a step of the round is safe; None if there is none, and if nothing is
            copied to other nodes.
        replicates: False if nothing is copied to other nodes: the agents only find steps that they write to disk.
    """

    round: int
    group: Group
    collector: Holder
    safe: SnapshotId | None
    replicates: bool = True


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


class _Collector:
    """The reports of the agents of a round, if this one is its collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round, self._goal = -1, Goal()
        self._reports: dict[int, Report] = {}
        self._partners: dict[int, int] | None = None
        """Who holds whose copies, by rank; None before all agents of the round have reported."""

    def report(self, hello: _Hello) -> _Answer:
        """Take a report; returns the goal and the agent that takes copies.

        Raises TransferError if a newer round has started.
        """
        members, group = hello.members, hello.members.group
        with self._lock:
            if members.round < self._round:
                raise TransferError("a round that is over")
            if members.round > self._round:
                self._round, self._goal, self._reports, self._partners = members.round, Goal(), {}, None
            self._reports[group.rank] = hello.report
            self._goal = next_goal(self._goal, self._reports, group.nodes, replicates=members.replicates)
            if self._partners is None and members.replicates and len(self._reports) == group.nodes:
                self._partners = partners(self._reports)
            rank = (self._partners or {}).get(group.rank)
            return _Answer(self._goal, None if rank is None else self._reports[rank])


class Replicator:
    """The exchange of snapshots between an agent and the others.

    Args:
        slots: Returns all slots of the agent, to send what others ask for.
        disk: Says when a step that all agents keep is to be found, and takes it.
    """

    def __init__(self, settings: Settings, slots: Callable[[], Sequence[Slot]], disk: DiskWriter) -> None:
        self.settings, self._slots, self.disk = settings, slots, disk
        self.safe: SnapshotId | None = None
        """The newest snapshot that is safe, as far as this agent knows."""
        self.replicas: dict[int, list[Slot]] = {}
        """Slots for copies of the parts of each local rank of another agent."""
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._places = threading.Semaphore(_AT_ONCE)
        self._collector = _Collector()
        self._participant: Participant | None = None
        self._taking = threading.Lock()
        self._changed = threading.Condition()
        self._source_ended = -1
        """The newest round of which the other agent sends no more."""
        self._last_byte = 0.0
        self._told: set[str] = set()

    def holder(self) -> Holder:
        """Return where other agents reach this one; raises OSError if it cannot listen."""
        with self._lock:
            self._server = self._server or Server(self.settings, self._attend)
        return Holder(self.settings.address, self._server.port)

    def begin(self, members: Members, whole: Sequence[Slot], parts: Mapping[int, Sequence[Slot]]) -> Participant:
        """Take part in a round until the workers have ended; see `Participant`."""
        self._participant = Participant(self, members, whole, parts)
        threading.Thread(target=self._participant.run, name="slurm-elastic-replicator", daemon=True).start()
        return self._participant

    def settle(self, participant: Participant, *, leaving: bool, until: float, is_leaving: Callable[[], bool]) -> None:
        """Wait until the newest parts of a round that is over are where they are needed, or until a monotonic time.

        With `leaving` this agent has to have sent its own; else those of another one have to be here. Ends if
        `is_leaving()`.
        """
        self._hear()
        with self._changed:
            while not is_leaving() and time.monotonic() < until:
                if participant.has_sent if leaving else not self._more_comes(participant):
                    return
                self._changed.wait(0.1)

    def _more_comes(self, participant: Participant) -> bool:
        is_silent = time.monotonic() >= self._last_byte + self.settings.silence
        return participant.has_others and self._source_ended < participant.members.round and not is_silent

    def notify(self) -> None:
        """Wake `settle`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections."""
        if self._participant is not None:
            self._participant.abandon()
        if self._server is not None:
            self._server.close()

    def tell_once(self, kind: str, problem: str) -> None:
        """Log a problem, unless one of its kind has been logged in the life of the agent."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("snapshots: %s", problem)

    # What other agents send.

    def _attend(self, channel: Channel) -> None:
        match channel.next(Request | _Hello | _Push):
            case Request() as request:
                if self._places.acquire(blocking=False):
                    try:
                        send_requested(channel, request, self._slots())
                    finally:
                        self._places.release()
            case _Hello() as hello:
                while True:
                    channel.say(self._collector.report(hello))
                    hello = _next_of_round(channel, _Hello)
            case _Push() as push:
                try:
                    while push.contents is not None:
                        self._take(channel, push, push.contents)
                        push = _next_of_round(channel, _Push)
                except OutOfMemoryError as error:
                    self.tell_once("memory", f"this node takes no copies from another one: {error}")
                finally:
                    # An agent that was lost sends nothing more.
                    self._source_ended = max(self._source_ended, push.round)
                    self.notify()

    def _take(self, channel: Channel, push: _Push, contents: Contents) -> None:
        self._hear()
        # A connection that was given up may still be taking.
        with self._taking:
            participant, rounds = self._participant, {push.round, contents.copy.id.round}
            if participant is None or not participant.members.replicates or rounds != {participant.members.round}:
                raise TransferError("a part of another round")
            # It comes again after a connection has ended, such as one that found its slot busy.
            self._source_ended = min(self._source_ended, push.round - 1)
            if push.local_rank not in self.replicas:
                self.replicas[push.local_rank] = [Slot.make() for _ in range(REPLICA_SLOTS)]
            slots = self.replicas[push.local_rank]
            copies = copies_in(slots)
            if contents.copy not in copies:
                slot = slots[slot_for_replica(copies, newest_of(push.safe, participant.protection().safe))]
                if slot.busy:
                    raise TransferError("its slot is being written to disk")
                if not contents.is_possible:
                    raise TransferError("a part without sizes")
                require_memory(contents.size + contents.description, slots)
                channel.receive_body(slot, contents, bodies_of(contents), self._hear)
            channel.say(Ready(copied=True))

    def _hear(self) -> None:
        self._last_byte = time.monotonic()


def _next_of_round(channel: Channel, kind: type[_T]) -> _T:
    """Wait as long as it takes: an agent whose workers make long steps says nothing for as long."""
    channel.socket.settimeout(None)
    message: _T = channel.next(kind)
    channel.socket.settimeout(_STALLED)
    return message


class Participant:
    """The part of this agent in a round: reports, protects, sends.

    Args:
        whole: The slots for the state of all ranks.
        parts: Those for the parts of each local rank, which come to it when it saves its first part.
    """

    def __init__(
        self, owner: Replicator, members: Members, whole: Sequence[Slot], parts: Mapping[int, Sequence[Slot]]
    ) -> None:
        self._owner, self.members, self._whole, self._parts = owner, members, whole, parts
        self._ended = threading.Event()
        self.has_sent = False
        """True if this agent has sent what is newest at the end of the round, or cannot."""
        self._goal = Goal()
        self.partner: Report | None = None
        """The agent that takes copies; None before all agents have reported, or if all are on one node."""
        self._copied: int | None = None
        self._pause_until = 0.0
        self._sending = 0.0
        """Seconds in which the present copy has used the network."""
        self._failing_since: float | None = None
        self._channels: dict[str, Channel] = {}
        """To the collector and the partner."""
        self._abandoned = False

    def run(self) -> None:
        """Take part until the workers have ended, and send what is newest then."""
        try:
            self._take_part()
        finally:
            self._drop("collector")
            self._drop("partner")
            self.has_sent = True
            self._owner.notify()

    def _take_part(self) -> None:
        turn = (_TURN if self.members.replicates else _SLOW_TURN) * max(1.0, self.members.group.nodes / 32)
        last = None
        while not self._abandoned and (not self._ended.is_set() or self._seeks(last)):
            if self._ended.is_set():
                # In a short round not all agents have reported yet.
                last = last or time.monotonic() + self._owner.settings.silence
            pause = turn
            try:
                self._turn()
            except (OSError, SessionError, TransferError):
                self._drop("collector")
                pause = turn if last else 0.2
            (time.sleep if last else self._ended.wait)(pause)
        if not self._abandoned and self.partner is not None:
            with contextlib.suppress(OSError, SessionError, TransferError):
                for local_rank, slots in [*self._parts.items()]:
                    newest = newest_of(*(slot.snapshot for slot in slots))
                    if newest is not None and newest.round == self.members.round:
                        self._send(self.partner, local_rank, slots, newest)
                self._channel("partner", self.partner.holder).say(_Push(self.members.round))

    def end(self, *, moves: bool) -> bool:
        """Have it end, as the workers have; False if it has been told before.

        With `moves` agents leave as announced, so that the newest parts are copied; else nothing more is.
        """
        is_first = not self._ended.is_set()
        self._ended.set()
        if not moves:
            self.abandon()
        return is_first

    def abandon(self) -> None:
        """Send nothing more, also of what is on its way; from any thread."""
        self._abandoned = True
        self._ended.set()
        for channel in [*self._channels.values()]:
            shut_down(channel.socket)

    @property
    def has_others(self) -> bool:
        """True if another agent sends its parts to this one, as far as this one knows."""
        return self.partner is not None or self._seeks(None)

    def _seeks(self, last: float | None) -> bool:
        """Return True if this agent does not know yet to which other one it sends, and can still learn that."""
        group = self.members.group
        alone = group.nodes == 1 or len(self._parts) < group.workers
        seeks = self.members.replicates and self.partner is None and not alone
        return seeks and (last is None or time.monotonic() < last)

    def _turn(self) -> None:
        members, settings = self.members, self._owner.settings
        if len(self._parts) < members.group.workers:
            return
        groups = (self._whole, *self._parts.values())
        protection = self.protection()
        for slots in groups:
            slots[0].protection = protection
        round_ = members.round
        snapshots = [
            [None if (held := slot.snapshot) is None or held.round != round_ else held for slot in slots]
            for slots in groups
        ]
        steps = [newest.step for ids in snapshots if (newest := newest_of(*ids)) is not None]
        kept, differs = kept_step(protection, snapshots)
        if kept is not None and not differs and self._copied != kept and not self._pauses():
            self._copy(SnapshotId(round_, kept))
        report = Report(
            settings.node,
            self._owner.holder(),
            min(steps) if len(steps) == len(snapshots) else None,
            self._goal.take,
            kept,
            differs,
            self._copied,
            self._owner.disk.wants_step(),
            self._pauses(),
            settings.domain,
        )
        channel = self._channel("collector", members.collector)
        channel.say(_Hello(members, report))
        answer = channel.next(_Answer)
        if members.replicates and answer.goal.safe != self._goal.safe and answer.goal.safe is not None:
            self._owner.safe = SnapshotId(round_, answer.goal.safe)
        if answer.goal.disk != self._goal.disk and answer.goal.disk is not None:
            # Before the next report: until then the step is protected, because it is the newest that is safe.
            self._owner.disk.agree(SnapshotId(round_, answer.goal.disk))
        self._goal, self.partner = answer.goal, answer.partner

    def protection(self) -> Protection:
        """Return which snapshots are not overwritten, as far as this agent knows."""
        round_, goal = self.members.round, self._goal
        safe = self.members.safe if goal.safe is None else SnapshotId(round_, goal.safe)
        return Protection(safe, None if goal.take is None else SnapshotId(round_, goal.take))

    def _copy(self, snapshot: SnapshotId) -> None:
        if self.members.replicates and self.members.group.nodes > 1 and self.partner is None:
            # All agents are on one node, or have not reported yet.
            return
        began, self._sending = time.monotonic(), 0.0
        if self.partner is not None:
            self._failing_since = self._failing_since or began
            size = 0
            try:
                for local_rank, slots in self._parts.items():
                    sent = self._send(self.partner, local_rank, slots, snapshot)
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
        if problem and not self._abandoned:
            self._owner.tell_once("slow", problem)

    def _send(self, to: Report, local_rank: int, slots: Sequence[Slot], snapshot: SnapshotId) -> int | None:
        """Send a part to another agent; returns its bytes, None if it is not here, or not whole any more."""
        for slot in slots:
            contents = slot.contents()
            if contents is None or contents.copy.id != snapshot:
                continue
            channel = self._channel("partner", to.holder)
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
                self._drop("partner")
                raise
            return contents.size
        return None

    def _channel(self, name: str, holder: Holder) -> Channel:
        if name not in self._channels:
            self._channels[name] = connect(holder, self._owner.settings, _STALLED)
        return self._channels[name]

    def _drop(self, name: str) -> None:
        if (channel := self._channels.pop(name, None)) is not None:
            channel.socket.close()
