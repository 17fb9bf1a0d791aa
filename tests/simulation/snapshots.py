"""Rounds of nodes that train, save, are killed in the middle of anything, and restore: with the product's decisions.

The product's code chooses (`choose`), prepares slots (`prepare`), picks the slot to overwrite (`slot_to_write`), writes
headers and reads them (`fill`, `contents`). The simulation has the memory, whose every store may be the last one of a
process, the network, which loses any message, and the truth: from which state each one was computed.

Checkpoints on disk are published late, also by groups that were cut off, and are all that is left when all nodes are
lost and the job is requeued. The product's code decides from which one a group starts (`choose_checkpoint`), what is on
its line, and which ones go (`deletable`).

In a third of the schedules nodes have three slots, in a third two, and in a third some have two and some three.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from slurm_elastic.snapshot import lineage, memory
from slurm_elastic.snapshot.disk import lineage as checkpoint_lineage
from slurm_elastic.snapshot.disk.lineage import CheckpointId, Start
from slurm_elastic.snapshot.lineage import Copy, Holder, Inventory, SnapshotId
from tests.simulation.violation import Violation

WORDS = 3
"""Length of a state; a torn one has words of several states."""
KINDS = ((3,), (2,), (2, 3))
"""Numbers of slots that the nodes of a schedule have, in turn."""


class KilledError(Exception):
    """The process that writes has carried out its last store."""


class Memory(list[int]):
    """The fields of a slot. The process that writes them is killed after so many stores; None for never."""

    stores_left: int | None = None

    def __setitem__(self, index: object, value: object) -> None:
        if self.stores_left is not None:
            if self.stores_left == 0:
                raise KilledError
            self.stores_left -= 1
        super().__setitem__(index, value)  # type: ignore[index, assignment]


@dataclass
class Node:
    """A node with its agent's memory and its workers' state."""

    name: str
    slots: list[Memory]
    state: int = 0
    step: int = 0
    saved: SnapshotId | None = None

    def held(self) -> list[Copy | None]:
        found = [memory.contents_of(slot, 1 << 20) for slot in self.slots]
        return [None if each is None else each.copy for each in found]

    def inventory(self) -> str:
        copies = tuple(copy for copy in self.held() if copy is not None)
        return lineage.write(Inventory(copies, Holder(self.name, 1), self.name)) if copies else ""

    def fill(self, slot: int, copy: Copy, words: Iterator[int] | list[int], stores_left: int | None = None) -> None:
        fields = self.slots[slot]

        def copied() -> None:
            for index, word in enumerate(words):
                fields[memory.FIELDS + index] = word

        fields.stores_left = stores_left
        try:
            memory.fill_slot(fields, memory.Contents(copy, 8 * WORDS, 0), copied)
        finally:
            fields.stores_left = None

    def save(self, round_: int, stores_left: int | None, digest: str) -> None:
        held = [None if copy is None else copy.id for copy in self.held()]
        slot = lineage.slot_to_write(held)
        self.fill(slot, Copy(SnapshotId(round_, self.step), digest), [self.state] * WORDS, stores_left)
        self.saved = SnapshotId(round_, self.step)

    def check_keeps_newest(self) -> None:
        held = [copy.id for copy in self.held() if copy is not None]
        if self.saved is not None and self.saved not in held:
            raise Violation("overwritten", f"{self.saved}, the newest snapshot of {self.name}; it holds {held}")


@dataclass
class Directory:
    """The directory of checkpoints.

    Attributes:
        starts: Records, oldest first.
        present: The state of each checkpoint.
        published: The state of each checkpoint that got its name on the newest line, without those that had two newer
            ones on it when they were deleted.
        writing: Checkpoints that are being written, with their states; the process that writes may be slow.
    """

    starts: list[Start] = field(default_factory=list)
    present: dict[CheckpointId, int] = field(default_factory=dict)
    published: dict[CheckpointId, int] = field(default_factory=dict)
    writing: list[tuple[CheckpointId, int]] = field(default_factory=list)

    def newest(self) -> Start | None:
        return self.starts[-1] if self.starts else None

    def start(self, run: str, round_: int, origin: lineage.Origin) -> CheckpointId | None:
        newest, chosen = self.newest(), None
        if origin.copy is None:
            chosen = checkpoint_lineage.choose_checkpoint(newest, self.present, origin.below)
            line = checkpoint_lineage.line_from_checkpoint(newest, chosen)
        else:
            on_line = {last.start for last in newest.line} | {newest.number} if newest is not None else set()
            starts = [start for start in reversed(self.starts) if start.number in on_line]
            line = checkpoint_lineage.line_from_memory(starts, run, origin.copy.id.round, origin.copy.id.step)
            if (lost := origin.lost) is not None:
                chosen = checkpoint_lineage.checkpoint_between(starts, run, origin.copy.id, lost, self.present)
            if chosen is not None:
                line = checkpoint_lineage.line_from_checkpoint(newest, chosen)
        self.starts.append(Start(len(self.starts) + 1, line, run, round_))
        return chosen

    def publish(self, checkpoint: CheckpointId, state: int, *, late: bool) -> None:
        """Give a checkpoint its name; `late`: its writer looked at the starts before the newest one was there."""
        newest = self.newest()
        assert newest is not None
        on_line = newest.has(checkpoint)
        if on_line or late:
            self.present[checkpoint] = state
        if on_line:
            self.published[checkpoint] = state
            for old in checkpoint_lineage.deletable(newest, list(self.present), 2):
                self.present.pop(old)
                if sum(old < other and newest.has(other) for other in self.published) >= 2:
                    self.published.pop(old, None)


class Run:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds = KINDS[seed % len(KINDS)]
        self.living = [self._new() for _ in range(self.random.randint(1, 4))]
        self.away: list[Node] = []
        """Agents that were cut off and train on, or wait as spares, and come back later."""
        self.count = len(self.living)
        self.parents: dict[int, tuple[int, int]] = {}
        """Of each state, the one that it was computed from and in which round."""
        self.truth: dict[tuple[int, int, int], int] = {}
        self.start = 0
        self.origin = ""
        self.round: int | None = None
        self.requeued = False
        """True if this is the first round of an incarnation after the first one."""
        self.disk = Directory()
        self.recorded: tuple[int | None, int] = None, 0
        """The last round whose start is recorded on disk, and the state that it started from."""

    def _new(self) -> Node:
        self.count = getattr(self, "count", 0) + 1
        memories = [Memory([0] * (memory.FIELDS + WORDS)) for _ in range(self.random.choice(self.kinds))]
        return Node(f"n{self.count}", memories)

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            self._one_round()

    def _one_round(self) -> None:
        draw = self.random
        if draw.random() < 0.08:
            # All nodes are lost, and the job is requeued. Those that were cut off write to disk still.
            self.living, self.away, self.requeued = [], [], True
        if not self.living or draw.random() < 0.3:
            self.living.append(self._new())
        while self.away and draw.random() < 0.4:
            self.living.append(self.away.pop(draw.randrange(len(self.away))))
        draw.shuffle(self.living)
        inventories = [node.inventory() for node in self.living]
        failed = draw.random() < 0.2
        if self.requeued:
            self.origin = ""
        origin_text = lineage.choose(None if self.requeued else self.round, self.origin, inventories, failed)
        if not self.requeued:
            self._check_newest(origin_text, inventories, failed)
        self.requeued = False
        round_ = 0 if self.round is None else self.round + 1
        last, before = self.round, self.start
        self.round, self.origin = round_, origin_text
        origin = lineage.read_origin(origin_text)
        # Without a snapshot the round starts from disk, as soon as rank 0 has recorded that.
        self.start = 0 if origin.copy is None else self._truth_of(origin.copy.id)
        members = []
        for node in list(self.living):
            fate = draw.random()
            if fate < 0.05:
                self.living.remove(node)  # lost before its place reaches it
            elif fate < 0.15:
                self.living.remove(node)
                self.away.append(node)  # a spare, or cut off: its place does not reach it either
            else:
                members.append(node)
        restored = {}
        for node in members:
            state = self._restore(node, origin)
            if state is not None:
                restored[node.name] = state
        if len(set(restored.values())) > 1:
            raise Violation("mixed", f"round {round_} starts from {restored}")
        for state in set(restored.values()) if origin.copy is not None else ():
            self._check_lineage(state, last, before)
            self.start = state
        if not restored or draw.random() < 0.05:
            # Rank 0 is lost before it has recorded the start: no rank starts.
            return
        chosen = self._start_on_disk(round_, origin)
        if chosen is not None:
            for node in members:
                node.state, node.step = self.start, chosen.step
                restored[node.name] = node.state
        self._train([node for node in members if node.name in restored], round_, origin)

    def _start_on_disk(self, round_: int, origin: lineage.Origin) -> CheckpointId | None:
        chosen = self.disk.start("run", round_, origin)
        if origin.copy is None:
            last, before = self.recorded
            usable = {
                each: state
                for each, state in self.disk.published.items()
                if (origin.below is None or each.step < origin.below) and self._is_on_line(state, last, before)
            }
            if usable and chosen is not None and origin.below is not None and chosen.step >= origin.below:
                raise Violation("repeated on disk", f"workers failed from step {origin.below}, and start from {chosen}")
            if chosen is not None and not self._is_on_line(self.disk.present[chosen], last, before):
                raise Violation("off the line on disk", f"{chosen}; round {last} started from {before}")
            if origin.below is None and usable and (chosen is None or chosen < max(usable)):
                raise Violation("lost on disk", f"{max(usable)}, and {chosen} is chosen")
            self.start = 0 if chosen is None else self.disk.present[chosen]
        self.recorded = round_, self.start
        return chosen

    def _restore(self, node: Node, origin: lineage.Origin) -> int | None:
        for fields, held in zip(node.slots, node.held(), strict=True):
            if held is not None and not origin.keeps(held):
                memory.clear_slot(fields)
        slot, fetch = lineage.prepare(node.held(), origin)
        node.saved = None
        if slot is None or origin.copy is None:
            node.state, node.step = 0, 0
            return 0
        if fetch and not self._fetch(node, slot, origin.holders, origin.copy):
            return None
        words = set(node.slots[slot][memory.FIELDS :])
        if len(words) > 1 or origin.copy not in node.held():
            raise Violation("torn", f"{node.name} starts from {words}")
        node.state, node.step, node.saved = words.pop(), origin.copy.id.step, origin.copy.id
        return node.state

    def _fetch(self, node: Node, slot: int, holders: tuple[Holder, ...], copy: Copy) -> bool:
        for holder in holders:
            sources = [other for other in self.living if other.name == holder.address and copy in other.held()]
            if sources:
                words = sources[0].slots[sources[0].held().index(copy)][memory.FIELDS :]
                lost = self.random.randrange(15) if self.random.random() < 0.3 else None
                try:
                    node.fill(slot, copy, words, lost)
                except KilledError:
                    continue
                return True
        return False

    def _train(self, members: list[Node], round_: int, origin: lineage.Origin) -> None:
        draw = self.random
        differs = draw.random() < 0.2
        for _ in range(draw.randrange(8 * (len(members) + 1))):
            if not members:
                return
            node = draw.choice(members)
            if node.step > min(other.step for other in members):
                continue
            node.step += 1
            node.state = self._computed(node.state, round_, node.step)
            if draw.random() < 0.2:
                continue
            digest = f"{node.name[1:]:0>16}" if differs and draw.random() < 0.5 else "0" * 16
            try:
                node.save(round_, draw.randrange(17) if draw.random() < 0.2 else None, digest)
            except KilledError:
                # The worker is dead. Its agent lives, or goes with it, or is cut off.
                members.remove(node)
                if draw.random() < 0.4:
                    self.living.remove(node)
                    if draw.random() < 0.5:
                        self.away.append(node)
            node.check_keeps_newest()
            self._write_to_disk(node, round_)
        for node in members:
            if draw.random() < 0.15:
                # Cut off: it goes on alone for a while.
                self.living.remove(node)
                self.away.append(node)
                for _ in range(draw.randrange(5)):
                    node.step += 1
                    node.state = self._computed(node.state, round_, node.step)
                    node.save(round_, None, "0" * 16)
                    self._write_to_disk(node, round_)

    def _write_to_disk(self, node: Node, round_: int) -> None:
        """Begin to write the state of a node, or end what was begun some time ago."""
        draw, disk = self.random, self.disk
        if draw.random() < 0.3 and node.saved is not None and node.saved.round == round_:
            starts = [start.number for start in disk.starts if start.round == round_]
            disk.writing += [(CheckpointId(number, node.step), node.state) for number in starts]
        while disk.writing and draw.random() < 0.4:
            checkpoint, state = disk.writing.pop(draw.randrange(len(disk.writing)))
            if draw.random() < 0.8:
                disk.publish(checkpoint, state, late=draw.random() < 0.3)

    def _computed(self, state: int, round_: int, step: int) -> int:
        return self.truth.setdefault((state, round_, step), self._make(state, round_, step))

    def _make(self, state: int, round_: int, step: int) -> int:
        key = (state, round_, step)
        if key in self.truth:
            return self.truth[key]
        made = len(self.parents) + 1
        self.parents[made] = (state, round_)
        return made

    def _truth_of(self, snapshot: SnapshotId) -> int:
        found = [
            made for (_, round_, step), made in self.truth.items() if (round_, step) == (snapshot.round, snapshot.step)
        ]
        return found[0]

    def _ancestors(self, state: int) -> set[int]:
        found = {state}
        while state in self.parents:
            state = self.parents[state][0]
            found.add(state)
        return found

    def _is_on_line(self, state: int, last: int | None, before: int) -> bool:
        """Return True if a state is older than the start of a round, or was computed from it in that round."""
        if state in self._ancestors(before) or state == 0:
            return True
        since = {self.parents[each][1] for each in self._ancestors(state) - self._ancestors(before)}
        return before in self._ancestors(state) and since == {last}

    def _check_lineage(self, state: int, last: int | None, before: int) -> None:
        """What a round starts from is older than the start of the last one, or was computed from it in that round."""
        if not self._is_on_line(state, last, before):
            raise Violation("off the line", f"{state}; round {last} started from {before}")

    def _check_newest(self, origin: str, inventories: list[str], failed: bool) -> None:
        """The newest snapshot of the last round that an agent holds is taken, unless nodes differ in it."""
        digests: dict[SnapshotId, set[str]] = {}
        for inventory in lineage.read_inventories(inventories):
            for copy in inventory.copies:
                if copy.id.round == self.round:
                    digests.setdefault(copy.id, set()).add(copy.digest)
        usable = [snapshot for snapshot, found in digests.items() if len(found) == 1]
        chosen = lineage.read_origin(origin).copy
        if usable and (chosen is None or chosen.id != max(usable)):
            raise Violation("lost", f"{max(usable)} is held, and {chosen} chosen")
        before = lineage.read_origin(self.origin).copy
        if failed and not digests and chosen is not None and before is not None and chosen.id >= before.id:
            raise Violation("repeated", f"workers failed from {before}, and start from {chosen}")
        if (
            chosen is None
            and not digests
            and not failed
            and before is not None
            and any(before in node.held() for node in self.living)
        ):
            raise Violation("lost", f"{before}, which the last round started from, is held, and nothing is chosen")
        if chosen is not None and len(digests.get(chosen.id, ())) > 1:
            raise Violation("mixed", f"nodes differ in {chosen}")


def play(seed: int, rounds: int = 8) -> None:
    """Play one schedule.

    Raises:
        Violation: a promise is broken.
    """
    Run(seed).play(rounds)
