"""What an agent is doing, as one value that is replaced at every change. No clock, no I/O."""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, replace

__all__ = ["CHANGE_BUCKETS", "Place", "Readings", "Snapshot", "Stage", "WorkerPlace", "enter", "lost_seconds"]

CHANGE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds, in seconds, of the histogram of round changes."""


class Stage(enum.Enum):
    """What an agent is doing."""

    STARTING = "starting"
    """It is looking for the leader, or has found it and said nothing yet."""
    JOINING = "joining"
    """It waits for a place in the next round, or starts the workers of one."""
    SPARE = "spare"
    """It waits for a place, and there is none."""
    TRAINING = "training"
    """Its workers run."""
    DONE = "done"
    """Its workers ended well; those of others may still run."""
    FAILED = "failed"
    """A worker failed; the leader's word is awaited."""
    STOPPING = "stopping"
    """The round is over; its workers are being stopped."""
    LEAVING = "leaving"
    """It goes, or the run is over; its workers are being stopped."""


_LOST = frozenset({Stage.STARTING, Stage.JOINING, Stage.FAILED, Stage.STOPPING})


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker of this node: global rank, rank on this node, process id."""

    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Place:
    """This node's place in a round.

    Attributes:
        round: its number.
        reason: why it was formed.
        nodes: how many nodes it has.
        members: these nodes, as a host list.
        node_rank: this node's rank among them.
        world_size: workers of all nodes.
        workers: those of this node.
    """

    round: int
    reason: str
    nodes: int
    members: str
    node_rank: int
    world_size: int
    workers: tuple[WorkerPlace, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that an agent tells about itself, but for what is looked up when somebody asks.

    Attributes:
        run, node, job, agent: names; see the agent's settings.
        max_restarts: of the run.
        stage: what it is doing.
        since: monotonic time at which it began that.
        place: in the round that runs here, or was the last that ran here; None before the first.
        restarts: charged to the run so far.
        notices: why it has to go, in the order in which it was told.
        rounds: how many rounds it had a place in, by reason.
        changes: how many round changes took no longer than each of `CHANGE_BUCKETS`, and last how many took longer.
        change_seconds: how long all of them took together.
        changing_since: monotonic time at which the present change began; None while its workers train.
        training, lost: seconds up to `since` in which its workers ran, and in which they should have and did not.
        steps: taken by its workers in rounds that are over.
        counted: whether the round that was here last is among them.
        hangs, kills: workers that the watchdog found hanging, and those that it killed.
    """

    run: str
    node: str
    job: str
    agent: str
    since: float
    max_restarts: int = 0
    stage: Stage = Stage.STARTING
    place: Place | None = None
    restarts: int = 0
    notices: tuple[str, ...] = ()
    rounds: tuple[tuple[str, int], ...] = ()
    changes: tuple[int, ...] = (0,) * (len(CHANGE_BUCKETS) + 1)
    change_seconds: float = 0.0
    changing_since: float | None = None
    training: float = 0.0
    lost: float = 0.0
    steps: int = 0
    counted: bool = True
    hangs: int = 0
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Readings:
    """What is looked up when somebody asks.

    Attributes:
        now: monotonic time.
        cpu_seconds, resident_bytes: of the agent's own process.
        leader: where the leader is, as far as this agent knows.
        leads: whether it is this agent.
        watchdog_age: seconds since the watchdog's thread showed that it lives; None without a watchdog.
        ignored: requests that the watchdog ignored.
        rejected: records of strangers that the leader dropped; 0 on the others.
        steps: the last step of each local worker that tells, by local rank.
        step_ages: seconds since it, by local rank.
        steps_here: steps taken in this round by all workers of this node.
    """

    now: float
    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    leader: str = ""
    leads: bool = False
    watchdog_age: float | None = None
    ignored: int = 0
    rejected: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    step_ages: tuple[tuple[int, float], ...] = ()
    steps_here: int = 0


def enter(snapshot: Snapshot, stage: Stage, now: float) -> Snapshot:
    """Begin another stage, and account for the one that ends."""
    training, lost = snapshot.training, lost_seconds(snapshot, now)
    if snapshot.stage is Stage.TRAINING:
        training += now - snapshot.since
    changed = replace(snapshot, stage=stage, since=now, training=training, lost=lost)
    if stage is Stage.TRAINING:
        return _change_over(changed, now)
    if stage in _LOST and snapshot.changing_since is None:
        return replace(changed, changing_since=now)
    return changed


def lost_seconds(snapshot: Snapshot, now: float) -> float:
    """Seconds up to now in which workers should have run here and did not."""
    return snapshot.lost + (now - snapshot.since if snapshot.stage in _LOST else 0.0)


def _change_over(snapshot: Snapshot, now: float) -> Snapshot:
    place, began = snapshot.place, snapshot.changing_since
    rounds = dict(snapshot.rounds)
    if place is not None:
        rounds[place.reason] = rounds.get(place.reason, 0) + 1
    snapshot = replace(snapshot, rounds=tuple(rounds.items()), changing_since=None)
    if began is None:
        return snapshot
    bucket = bisect.bisect_left(CHANGE_BUCKETS, now - began)
    changes = (*snapshot.changes[:bucket], snapshot.changes[bucket] + 1, *snapshot.changes[bucket + 1 :])
    return replace(snapshot, changes=changes, change_seconds=snapshot.change_seconds + now - began)
