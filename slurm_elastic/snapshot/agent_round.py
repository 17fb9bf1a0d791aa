"""The snapshots of one round as its agent has them: groups of slots, borrowed ones, and the step to go on from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slurm_elastic.snapshot.disk.agent_side import Target
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.hand_over import (
    Directory,
)
from slurm_elastic.snapshot.lineage import Holder, Origin
from slurm_elastic.snapshot.memory import Slot
from slurm_elastic.snapshot.transfer import Ranges

logger = logging.getLogger("slurm_elastic")


@dataclass(frozen=True, slots=True)
class Group:
    """The place of an agent among those of a round.

    Attributes:
        rank: Of the agent.
        nodes: Number of agents.
        workers: Number of its workers.
        base_rank: Global rank of its first worker.
        world: Number of workers of all agents.
    """

    rank: int
    nodes: int
    workers: int
    base_rank: int
    world: int


class Borrowed:
    """A part of the origin in memory that lasts until the workers have loaded it.

    Attributes:
        slot: With the part; None if it cannot be had.
        error: Why not.
        ready: Set when one of them is known.
        asked: True if a worker has asked for it.
    """

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.error = ""
        self.ready = threading.Event()
        self.asked = False


class RoundSnapshots:
    """The preparation of the memory for one round.

    Attributes:
        number: Of the round.
        slot: Index of the slot from which its workers start; None if from none.
        origin: Of the round.
        fetches: The memory that a transfer writes; None if the snapshot is here.
        replacement: An empty slot that takes its place if the round ends before the transfer: made before, because
            there may be no descriptor left then, and the agent cannot wait for the other side.
        ready: Set when the slot has its snapshot, or will not have it.
        cancelled: Set when the round is over.
        error: Why the slot does not have it.
        borrowed: Parts of the origin that other agents hold, by number, whether without shards, and their ranges.
        group: The place of the agent among those of the round; None if it copies no parts to other nodes.
        collector: The process that finds steps for the disk, if no parts are copied to other nodes.
        writers: The slots of the local ranks that write parts.
        reports: True if the other process of this agent copies parts to another node, or reports them.
        settled: True if that process knows that the workers have ended.
        expected: Parts, with their ranges, that workers will probably ask for; empty if that is not known.
    """

    def __init__(self, number: int, slot: int | None = None, origin: Origin | None = None) -> None:
        self.number, self.slot, self.origin = number, slot, origin or Origin()
        self.fetches: Slot | None = None
        self.replacement: Slot | None = None
        self.ready, self.cancelled = threading.Event(), threading.Event()
        self.error = ""
        self.borrowed: dict[tuple[int, bool, Ranges | None], Borrowed] = {}
        self.group: Group | None = None
        self.collector: Holder | None = None
        self.writers: dict[int, Sequence[Slot]] = {}
        self.reports = self.settled = False
        self.expected: frozenset[tuple[int, Ranges | None]] = frozenset()

    def drop_expected(self) -> None:
        """Let go of what no worker has asked for, as what they need was not foreseen: the memory may be needed."""
        self.expected = frozenset()
        for key in [key for key, loan in self.borrowed.items() if not loan.asked]:
            del self.borrowed[key]

    def fail(self, why: str) -> None:
        """Have the workers fail, unless the round is over: another state than that of the others is not theirs."""
        if not self.cancelled.is_set():
            self.error = why
            logger.error("the snapshot that round %d starts from: %s", self.number, why)
        self.ready.set()


def start_thread(current: RoundSnapshots, work: Callable[..., None], *arguments: object) -> None:
    """Do a part of the preparation of a round in a thread of its own."""

    def prepare() -> None:
        try:
            work(current, *arguments)
        except OSError:
            # An agent that ends closes its slots.
            if not current.cancelled.is_set():
                raise

    threading.Thread(target=prepare, name="slurm-elastic-snapshot-fetch", daemon=True).start()


def target_of(directory: Directory, current: RoundSnapshots) -> Target:
    """Return where the snapshots of a round are written on disk, and what they follow."""
    copy = current.origin.copy
    origin = None
    if copy is not None and directory.origin is not None:
        origin = copy.id, CheckpointId(directory.origin, copy.id.step)
    group = current.group or Group(0, 1, 1, 0, 1)
    return replace(
        Target.of(directory, current.number),
        origin=origin,
        first=directory.first,
        nodes=group.nodes,
        workers=group.workers,
    )


def log_origin(round_: int, origin: Origin) -> None:
    """Log the snapshot that a round starts from."""
    if origin.note:
        logger.warning("snapshots: %s", origin.note)
    if origin.copy is not None:
        step, taken = origin.copy.id.step, origin.copy.id.round
        logger.info(
            "the workers of round %d start from the snapshot of step %d, taken in round %d%s",
            *(round_, step, taken),
            f", unless one up to step {origin.lost.step} is on disk" if origin.lost is not None else "",
        )
