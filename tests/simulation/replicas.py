"""Rounds of nodes whose parts of snapshots are copied to other nodes, with the product's decisions.

The product's code names the step that becomes safe (`next_goal`) and the node that holds copies (`partners`), says
which step a node keeps (`kept_step`), which slot is overwritten by a worker (`slot_to_write`) and by a copy
(`slot_for_replica`), and what the next round starts from (`choose`). The simulation has the slots, workers that are
more or less far, reports and answers that are late or lost, copies that break, and nodes that are lost, alone or
together. In two thirds of the schedules nodes are in failure domains, of which one may be lost at once. Some nodes
are only cut off, and come back rounds later with what they held; processes that report are paused; a leader is lost
after it has put a round on record that no agent starts. Agents write steps to disk that all of them keep, with copies
on other nodes or without any; the last of them to end gives the checkpoint its name, also when the next round has
started. A round starts from disk if a newer step is there than memory has as a whole. Nodes have three slots, two, or
some have two and some three.

Some schedules copy and write nothing, so that each node overwrites its oldest step; a worker that is killed there ends
the round, as in a collective.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_elastic.snapshot import lineage, replication
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.lineage import Copy, Holder, Origin, Protection, SnapshotId
from slurm_elastic.snapshot.replication import Goal, Report
from tests.simulation.snapshots import KINDS, Directory
from tests.simulation.violation import Violation


@dataclass
class Node:
    """A node with one worker, whose part has the number of the node's rank."""

    rank: int
    domain: str
    parts: list[Copy | None]
    shared: list[Copy | None]
    replicas: list[Copy | None] = field(default_factory=lambda: [None] * 2)
    goal: Goal = field(default_factory=Goal)
    copied: int | None = None
    step: int = 0
    saved: int = 0
    """The newest step of which the worker has taken a snapshot, or has gone on without one."""
    killed: bool = False
    wanted: bool = False
    writing: SnapshotId | None = None
    """The snapshot that is being written to disk."""
    paused: int = 0
    """Turns for which the process that reports is paused."""
    copy_pause: int = 0
    """Turns for which it pauses after a copy."""

    def protection(self, round_: int, protected: SnapshotId | None) -> Protection:
        goal = self.goal
        safe = protected if goal.safe is None else SnapshotId(round_, goal.safe)
        return Protection(safe, None if goal.take is None else SnapshotId(round_, goal.take))

    def inventory(self, *, replicates: bool) -> str:
        held = [copy for copy in (*self.shared, *self.parts, *self.replicas) if copy is not None]
        return lineage.take_inventory(held, Holder(str(self.rank), 1), str(self.rank), 1 << 16, replicates=replicates)

    def holds(self, copy: Copy) -> bool:
        return copy in self.parts or copy in self.replicas

    def keeps(self, snapshot: SnapshotId) -> bool:
        return all(any(copy is not None and copy.id == snapshot for copy in held) for held in (self.parts, self.shared))


class Run:
    """One schedule.

    Args:
        seed: Of what is drawn.
        kinds: Numbers of slots that nodes have; None for those that the seed gives.
        ahead: Steps that a rank may be ahead of another one.
    """

    def __init__(self, seed: int, kinds: tuple[int, ...] | None = None, ahead: int = 1) -> None:
        self.random = random.Random(seed)
        self.kinds, self.ahead = kinds or KINDS[seed % len(KINDS)], ahead
        # Schedules without domains stay as they are.
        self.of_domains = random.Random(f"domains {seed}")
        self.domains = self.of_domains.choice([[""], ["s0/a", "s0/b"], ["s0/a", "s0/b", "s1/c"]])
        self.world = self.random.randint(2, 5)
        self.nodes = [self._new(rank) for rank in range(self.world)]
        self.replicates = self.random.random() < 0.8
        self.is_plain = not self.replicates and self.random.random() < 0.5
        """True if nothing is copied to other nodes or written to disk."""
        self.away: list[Node] = []
        """Nodes that are cut off, with what they hold."""
        self.origin = Origin()
        self.protected: SnapshotId | None = None
        """What is kept until a step of the round is safe, if parts are copied to other nodes."""
        self.text = ""
        self.disk = Directory()
        self.disk.start("run", 0, Origin())
        self.unwritten: dict[SnapshotId, int] = {}
        """Of snapshots that are named for the disk, how many nodes have not written them yet."""
        self.origins: dict[int, SnapshotId | None] = {0: None}
        """By round."""
        self.began: dict[int, SnapshotId | None] = {0: None}
        """What the workers have started from, in memory or on disk, of the rounds that have started."""
        self.found = 0
        """Steps that became safe, or were written to disk."""

    def _new(self, rank: int) -> Node:
        slots = self.random.choice(self.kinds)
        return Node(rank, self.of_domains.choice(self.domains), [None] * slots, [None] * slots)

    def play(self, rounds: int) -> None:
        round_: int | None = 0
        for _ in range(rounds):
            assert round_ is not None
            self._train(round_)
            round_ = self._next_round(round_)
            if round_ is None:
                return

    def _train(self, round_: int) -> None:
        draw, goal, reports = self.random, Goal(), dict[int, Report]()
        places = {node.rank: Report(str(node.rank), Holder("", 1), domain=node.domain) for node in self.nodes}
        self.partners = replication.partners(places)
        for node in self.nodes:
            began = self.began[round_]
            node.goal, node.copied, node.step = Goal(), None, 0 if began is None else began.step
            node.writing, node.paused, node.wanted, node.copy_pause = None, 0, False, 0
            node.saved, node.killed = node.step, False
        start = self.nodes[0].step
        for _ in range(draw.randrange(80 * self.world)):
            node = draw.choice(self.nodes)
            self._end_writing([node], 0.3)
            if draw.random() < 0.004:
                node.paused = draw.randrange(15)
            if draw.random() < 0.6:
                # All make a step before one makes the next; a rank may be ahead, of one that is killed, too.
                if not node.killed and node.step < min(other.saved for other in self.nodes) + self.ahead:
                    node.step += 1
                    self._save(node, round_)
            elif node.paused:
                node.paused -= 1
            else:
                wants = node.rank == 0 and node.writing is None and not self.is_plain
                node.wanted |= wants and draw.random() < 0.4
                report = self._report(node, round_)
                if draw.random() < 0.2:
                    continue
                reports[node.rank] = report
                before, goal = goal, replication.next_goal(goal, reports, self.world, replicates=self.replicates)
                self.found += goal.safe != before.safe
                if draw.random() < 0.8:
                    self._adopt(node, round_, goal)
            self._check_safe(round_, goal)
            self._check_complete(round_, start)
            for each in self.nodes:
                if each.writing is not None and not each.keeps(each.writing):
                    raise Violation("not on disk", f"node {each.rank} does not hold {each.writing} any more")

    def _adopt(self, node: Node, round_: int, goal: Goal) -> None:
        """A node gets an answer. It marks what is to be written to disk before it reports again."""
        if goal.disk is not None and goal.disk != node.goal.disk:
            node.writing, node.wanted = SnapshotId(round_, goal.disk), False
            self.unwritten.setdefault(node.writing, self.world)
        node.goal = goal

    def _end_writing(self, nodes: Sequence[Node], share: float) -> None:
        """Some of the nodes that write have written their part of a snapshot, and the last of all gives it its name."""
        for node in nodes:
            if node.writing is None or self.random.random() >= share:
                continue
            snapshot, node.writing = node.writing, None
            self.unwritten[snapshot] -= 1
            if self.unwritten[snapshot] == 0:
                for start in [each.number for each in self.disk.starts if each.round == snapshot.round]:
                    # It may have looked for the newest start before that was there.
                    self.disk.publish(CheckpointId(start, snapshot.step), 0, late=self.random.random() < 0.3)

    def _save(self, node: Node, round_: int) -> None:
        draw, snapshot = self.random, SnapshotId(round_, node.step)
        protection = node.protection(round_, self.protected)
        copies = (
            (node.parts, Copy.of_part(snapshot, node.rank, self.world)),
            (node.shared, Copy(snapshot, "", self.world)),
        )
        for slots, copy in copies:
            held = [None if each is None else each.id for each in slots]
            busy = [slot for slot, each in enumerate(held) if each is not None and each == node.writing]
            slot = lineage.slot_to_write(held, busy, protection)
            if slot is None:
                # Of two slots none is left while a copy is on its way.
                if busy or len(slots) == 2:
                    continue
                raise Violation("a slot is left", f"none of {slots} for {copy}")
            slots[slot] = None
            # A worker that is killed while it copies leaves nothing.
            if draw.random() < 0.98:
                slots[slot] = copy
            elif self.is_plain:
                node.killed = True
                return
        node.saved = node.step

    def _report(self, node: Node, round_: int) -> Report:
        held = [
            [None if each is None or each.id.round != round_ else each.id for each in slots]
            for slots in (node.shared, node.parts)
        ]
        protection = node.protection(round_, self.protected)
        kept, differs = replication.kept_step(protection, held)
        node.copy_pause = max(0, node.copy_pause - 1)
        if (
            kept is not None
            and not differs
            and node.copied != kept
            and not node.copy_pause
            and self._send(node, SnapshotId(round_, kept))
        ):
            node.copied, node.copy_pause = kept, self.random.randrange(4)
        newest = [max((each.step for each in ids if each is not None), default=None) for ids in held]
        known = None if None in newest else min(each for each in newest if each is not None)
        name, goal = str(node.rank), node.goal
        return Report(
            name, Holder(name, 1), known, goal.take, kept, differs, node.copied, node.wanted, node.copy_pause > 0
        )

    def _send(self, node: Node, snapshot: SnapshotId) -> bool:
        if not self.replicates:
            return True
        target = self.nodes[self.partners[node.rank]]
        copy = Copy.of_part(snapshot, node.rank, self.world)
        if copy not in node.parts:
            return False
        if copy in target.replicas:
            return True
        safe = replication.newest_of(*(each.protection(snapshot.round, self.protected).safe for each in (node, target)))
        slot = replication.slot_for_replica(target.replicas, safe)
        target.replicas[slot] = None
        if self.random.random() < 0.2:
            return False
        target.replicas[slot] = copy
        return self.random.random() < 0.9

    def _check_safe(self, round_: int, goal: Goal) -> None:
        if goal.safe is None or not self.replicates:
            return
        for rank in range(self.world):
            copy = Copy.of_part(SnapshotId(round_, goal.safe), rank, self.world)
            holders = [node.rank for node in self.nodes if node.holds(copy)]
            if len(holders) < 2:
                raise Violation("not safe", f"{copy} is held by {holders}")
        self.safe = SnapshotId(round_, goal.safe)

    safe: SnapshotId | None = None

    def _check_complete(self, round_: int, start: int) -> None:
        """The newest step that all have saved is in memory as a whole: a worker that is killed costs one step."""
        if not self.is_plain:
            return
        newest = min(node.saved for node in self.nodes)
        snapshot = SnapshotId(round_, newest)
        if newest > start and not all(node.keeps(snapshot) for node in self.nodes):
            raise Violation("not complete", f"all have saved {snapshot}, and one has overwritten it")

    def _next_round(self, round_: int) -> int | None:
        """Form the round that follows, without the nodes that are lost; returns its number, None if the run ends."""
        draw = self.random
        self._end_writing(self.nodes, 0.7)
        lost = draw.sample(self.nodes, min(self.world, draw.choice([0, 1, 1, 2])))
        has_partners_elsewhere = len(lost) < 2
        if len({node.domain for node in self.nodes}) > 1 and self.of_domains.random() < 0.3:
            domain = self.of_domains.choice(self.nodes).domain
            lost = [node for node in self.nodes if node.domain == domain]
            # Copies of an earlier round went by its nodes.
            is_of_this_round = self.safe is not None and self.safe.round == round_
            has_partners_elsewhere = is_of_this_round and 2 * len(lost) <= self.world
        left = [node for node in self.nodes if node not in lost]
        is_seen = True
        last = round_
        if left and draw.random() < 0.2:
            # A leader is lost when it has put the round on record: no agent starts it, and not all have joined it.
            is_seen = False
            self._choose(last, draw.sample(left, draw.randint(1, len(left))))
            last += 1
        back = [node for node in self.away if draw.random() < 0.5]
        self.away = [node for node in (*self.away, *lost) if node not in back and draw.random() < 0.7]
        origin = self._choose(last, [*left, *back])
        must_be_safe = is_seen and self.replicates and has_partners_elsewhere
        safe = self.safe if self.safe is not None and self.safe.round == round_ else self.origin.safe
        safe = safe if must_be_safe else None
        if origin.copy is None:
            if safe is not None:
                raise Violation("lost", f"{safe} is safe, and nothing is chosen without {lost}")
            return None
        if safe is not None and origin.copy.id < safe:
            raise Violation("lost", f"{safe} is safe, and {origin.copy.id} chosen")
        seen = [each.id for node in (*left, *back) for each in node.shared if each is not None]
        seen = [each for each in seen if self._descends(last, each, self.origins)]
        new = [self._new(0) for _ in range(draw.randint(0 if left else 1, 2))]
        self.nodes = [*left, *back, *new]
        self.world = len(self.nodes)
        for rank, node in enumerate(self.nodes):
            node.rank = rank
            for slots in (node.parts, node.replicas, node.shared):
                slots[:] = [each if each is not None and origin.keeps(each) else None for each in slots]
            if origin.copy not in node.shared:
                held = [None if each is None else each.id for each in node.shared]
                slot_to_fetch = lineage.slot_to_write(held, (), Protection(origin.protected))
                assert slot_to_fetch is not None
                node.shared[slot_to_fetch] = replace(origin.copy)
        self.origin, self.protected = origin, origin.protected if self.replicates else None
        self._start(last + 1, origin, max(seen, default=None))
        self._end_writing(left, 0.5)
        return last + 1 if self.world > 1 else None

    def _start(self, round_: int, origin: Origin, seen: SnapshotId | None) -> None:
        """Rank 0 records the start of a round on disk, from the snapshot in memory or one on disk that is newer."""
        assert origin.copy is not None
        newest, last = self.disk.starts[-1], max(self.began)
        on_disk = [self._snapshot(each) for each in self.disk.present if newest.has(each)]
        chosen = self.disk.start("run", round_, origin)
        began = origin.copy.id if chosen is None else self._snapshot(chosen)
        if not self._descends(last, began, self.began):
            raise Violation("off the line on disk", f"{began} after round {last}, {self.began}")
        # Of the last round nothing is in memory, so what it has started from has to be the start again, or a later one.
        before = self.began[last]
        if before is not None and before in on_disk and began < before:
            raise Violation("lost on disk", f"round {last} has started from {before}, and {began} is chosen")
        known = [each for each in on_disk if seen is not None and origin.copy.id < each <= seen]
        if known and began < max(known):
            raise Violation("lost on disk", f"{max(known)}, and {began} is chosen after parts of {seen} are lost")
        self.began[round_] = began

    def _snapshot(self, checkpoint: CheckpointId) -> SnapshotId:
        return SnapshotId(self.disk.starts[checkpoint.start - 1].round, checkpoint.step)

    def _choose(self, last: int, present: Sequence[Node]) -> Origin:
        """Choose the origin of the round after the last one; it is on the line, and whole."""
        inventories = [node.inventory(replicates=self.replicates) for node in present]
        self.text = lineage.choose(last, self.text, inventories)
        origin = lineage.read_origin(self.text)
        self.origins[last + 1] = None if origin.copy is None else origin.copy.id
        if origin.copy is None:
            return origin
        if not self._descends(last, origin.copy.id, self.origins):
            raise Violation("off the line", f"{origin.copy.id} after round {last}, {self.origins}")
        for part in range(origin.copy.parts):
            copy = Copy.of_part(origin.copy.id, part, origin.copy.parts)
            if not any(node.holds(copy) for node in present):
                raise Violation("not covered", f"{copy} is held by no node that is left, and chosen")
        return origin

    def _descends(self, round_: int, snapshot: SnapshotId, origins: Mapping[int, SnapshotId | None]) -> bool:
        """Return True if a round has taken a snapshot, or its state went through it."""
        before: SnapshotId | None = SnapshotId(round_, snapshot.step)
        while before is not None:
            if before.round == snapshot.round:
                return snapshot.step <= before.step
            before = origins[before.round]
        return False


def play(seed: int, kinds: tuple[int, ...] | None = None, ahead: int = 1) -> int:
    """Play one schedule; returns how many steps became safe. See `Run`.

    Raises:
        Violation: a promise is broken.
    """
    run = Run(seed, kinds, ahead)
    run.play(5)
    return run.found
