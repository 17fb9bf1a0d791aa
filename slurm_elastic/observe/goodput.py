"""The time of every node of a run, by what it was spent on. Pure.

The time of an agent, from the start of its process to its end, is cut into segments without gaps, so the buckets add up
to the node time. Times are of each node's own clock; only the end of an agent that was lost is the leader's.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_elastic.observe.records import Event, RunRecords, Worker
from slurm_elastic.rendezvous.identity import AgentIdentity

__all__ = ["Bucket", "Goodput", "RoundProgress", "Segment", "goodput", "round_progress", "segments"]


class Bucket(enum.Enum):
    """The uses of node time, by the names of ml-goodput where it has one."""

    PRODUCTIVE = "productive"
    """Steps that counted."""
    WASTED = "wasted_progress"
    """Steps that were taken again after a restart."""
    INITIALIZATION = "initialization"
    """From the start of an agent's process to the first step of its first round."""
    RECOVERY = "infrastructure_recovery"
    """From the last step of a round to the first step of the next one."""
    SPARE = "spare"
    """The node waited as a spare."""
    UNREPORTED = "unreported"
    """Workers ran whose script does not use the trainer API."""
    SHUTDOWN = "shutdown"
    """From the last step of an agent to its end."""
    QUEUE = "queue"
    """The job waited in Slurm's queue between two starts; the time of the nodes that it got then."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Time of an agent, in seconds since 1970."""

    node: str
    agent: str
    start: float
    end: float
    bucket: Bucket
    round: int | None = None

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The steps of a round.

    Attributes:
        number: The round.
        reports: True if its script uses the trainer API.
        first_step, last_step: Its first and last step in the script's own count; None if the script gives none.
        calls: Calls of should_stop.
        redone: How many of its steps later rounds have taken again; None if that is unknown.
        first: Seconds from the start of the workers to the first step.
        seconds: Seconds from the first step to the last.
    """

    number: int
    reports: bool = False
    first_step: int | None = None
    last_step: int | None = None
    calls: int = 0
    redone: int | None = None
    first: float | None = None
    seconds: float | None = None

    @property
    def wasted_share(self) -> float:
        """The share of its steps that were taken again."""
        if not self.redone or self.first_step is None or self.last_step is None:
            return 0.0
        return min(1.0, self.redone / (self.last_step - self.first_step + 1))

    @property
    def steps_per_second(self) -> float | None:
        """Calls of should_stop per second."""
        return (self.calls - 1) / self.seconds if self.seconds and self.calls > 1 else None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Node time in seconds by bucket.

    Attributes:
        seconds: By bucket; every bucket is there.
        redone_steps: Number of steps that were taken again; None if that is unknown.
        missing: One line for each number that is unknown, with the reason.
    """

    seconds: Mapping[Bucket, float] = field(default_factory=dict)
    redone_steps: int | None = None
    missing: tuple[str, ...] = ()

    @property
    def node_seconds(self) -> float:
        """All time."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """The share of the node time that was spent on steps that counted; None if scripts report no steps."""
        if self.seconds.get(Bucket.UNREPORTED) and not self.seconds.get(Bucket.PRODUCTIVE):
            return None
        return self.seconds.get(Bucket.PRODUCTIVE, 0.0) / self.node_seconds if self.node_seconds else None


def round_progress(records: RunRecords) -> dict[int, RoundProgress]:
    """Return the steps of each round, as its agents have recorded them."""
    found: dict[int, RoundProgress] = {}
    for number, workers in _workers(records.progress).items():
        known = [worker for worker in workers if worker.reports and worker.steps]
        if not known:
            found[number] = RoundProgress(number, reports=any(worker.reports for worker in workers))
            continue
        # All ranks take the same steps; a rank whose agent was lost has told less.
        furthest = max(known, key=lambda worker: worker.steps)
        firsts = [worker.first for worker in known if worker.first is not None]
        seconds = None
        if furthest.first is not None and furthest.last is not None:
            seconds = max(0.0, furthest.last - furthest.first)
        found[number] = RoundProgress(
            number,
            reports=True,
            first_step=furthest.first_step,
            last_step=furthest.step,
            calls=furthest.steps,
            first=statistics.median(firsts) if firsts else None,
            seconds=seconds,
        )
    return {number: replace(each, redone=_redone(each, found.values())) for number, each in found.items()}


def segments(records: RunRecords, now: float) -> tuple[Segment, ...]:
    """Return the time of all agents and of the queue, without gaps.

    Args:
        records: The records of the run.
        now: Where the time of agents ends that still run, in seconds since 1970.
    """
    steps = round_progress(records)
    found: list[Segment] = []
    for agent, own in _by_agent(records.progress).items():
        found += _agent_segments(agent, own, _end(own, records, now), records, steps)
    return (*found, *_queue(found))


def goodput(found: Iterable[Segment], steps: Mapping[int, RoundProgress]) -> Goodput:
    """Add up segments.

    Args:
        found: The segments, of the whole run or of a part of it.
        steps: The steps of all rounds.
    """
    seconds = dict.fromkeys(Bucket, 0.0)
    rounds = set()
    for segment in found:
        seconds[segment.bucket] += segment.seconds
        if segment.round is not None:
            rounds.add(segment.round)
    mine = [steps[number] for number in sorted(rounds & steps.keys())]
    redone = [each.redone for each in mine if each.redone is not None]
    return Goodput(seconds, sum(redone) if redone else None, tuple(_missing(mine)))


def _missing(rounds: Sequence[RoundProgress]) -> Iterator[str]:
    if any(not each.reports for each in rounds):
        yield "steps: scripts that do not use slurm_elastic.trainer report none; their time is in the bucket unreported"
    if any(each.reports and each.calls and each.last_step is None for each in rounds):
        yield "wasted progress: scripts call should_stop without a step, so steps that were taken again are unknown"
    yield "data loading, checkpoint save and restore: not measured apart, but part of the other buckets"
    yield "queue before the first start of a job: only Slurm's accounting knows it"


def _workers(progress: Sequence[Event]) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {}
    for event in progress:
        if event.round is not None:
            found.setdefault(event.round, []).extend(event.workers)
    return found


def _redone(round_: RoundProgress, rounds: Iterable[RoundProgress]) -> int | None:
    """Return how many steps of a round later rounds have taken again."""
    if round_.first_step is None or round_.last_step is None:
        return None
    later = [each.first_step for each in rounds if each.number > round_.number and each.first_step is not None]
    begun = min(later, default=round_.last_step + 1)
    return max(0, round_.last_step - max(begun, round_.first_step) + 1)


def _by_agent(progress: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in progress:
        if event.agent:
            found.setdefault(event.agent, []).append(event)
    return found


def _end(own: Sequence[Event], records: RunRecords, now: float) -> float:
    """Return when an agent ended: by its own record, when it was lost, or when the run was over."""
    last = own[-1]
    if last.kind == "agent_ended":
        return last.time
    for event in records.events:
        if event.time >= last.time and event.kind in ("node_lost", "node_left") and last.node in event.nodes:
            return event.time
    identity = AgentIdentity.parse(last.agent)
    later = [
        event.time
        for event in records.progress
        if event.kind == "agent_started" and event.time > last.time and _is_next_start(identity, event.agent)
    ]
    if later:
        # Slurm has started its job again; when the agent was killed is unknown.
        same = [event.time for event in (*records.progress, *records.events) if last.time <= event.time < min(later)]
        return max(same, default=last.time)
    over = records.done is not None or any(
        event.kind == "run_ended" and event.time >= last.time for event in records.events
    )
    if over:
        return max((event.time for event in (*records.progress, *records.events)), default=last.time)
    return max(now, last.time)


def _is_next_start(identity: AgentIdentity | None, agent: str) -> bool:
    other = AgentIdentity.parse(agent)
    return (
        identity is not None
        and other is not None
        and (other.job, other.restarts > identity.restarts) == (identity.job, True)
    )


def _agent_segments(
    agent: str, own: Sequence[Event], end: float, records: RunRecords, steps: Mapping[int, RoundProgress]
) -> Iterator[Segment]:
    node, first = own[0].node, own[0]
    at = first.time - (first.number("seconds") or 0.0 if first.kind == "agent_started" else 0.0)
    trained = False
    spare = [event.time for event in records.events if event.kind == "node_spare" and node in event.nodes]

    def until(to: float, bucket: Bucket, round_: int | None = None) -> Iterator[Segment]:
        nonlocal at
        to = min(max(to, at), max(end, at))
        if to > at:
            yield Segment(node, agent, at, to, bucket, round_)
            at = to

    def waiting(to: float) -> Iterator[Segment]:
        bucket = Bucket.RECOVERY if trained else Bucket.INITIALIZATION
        waits = [time for time in spare if at <= time <= to]
        if waits:
            yield from until(waits[0], bucket)
            bucket = Bucket.SPARE
        yield from until(to, bucket)

    starts = [event for event in own if event.kind == "workers_started"]
    for started in starts:
        yield from waiting(started.time)
        number = started.round
        ended = next(
            (e for e in own if e.kind == "workers_ended" and e.round == number and e.time >= started.time), None
        )
        over = ended.time if ended is not None else end
        progress = steps.get(number, RoundProgress(-1)) if number is not None else RoundProgress(-1)
        mine = next((worker for worker in ended.workers if worker.reports), None) if ended is not None else None
        begun = (mine.first if mine is not None else None) or progress.first
        if not progress.reports:
            yield from until(over, Bucket.UNREPORTED, number)
        elif begun is None:
            # No step was taken.
            yield from until(over, Bucket.RECOVERY if trained else Bucket.INITIALIZATION, number)
        else:
            yield from until(started.time + begun, Bucket.RECOVERY if trained else Bucket.INITIALIZATION, number)
            last = started.time + mine.last if mine is not None and mine.last is not None else over
            steps_begin = at
            yield from until(last - (last - steps_begin) * progress.wasted_share, Bucket.PRODUCTIVE, number)
            yield from until(last, Bucket.WASTED, number)
        trained = True
    if starts:
        spares_last = [time for time in spare if time >= at]
        if spares_last:
            yield from waiting(end)
        yield from until(end, Bucket.SHUTDOWN)
    else:
        yield from waiting(end)


def _queue(found: Sequence[Segment]) -> Iterator[Segment]:
    """Yield the time between the starts of a job, for each node that it got by the later one."""
    starts: dict[tuple[str, int], list[Segment]] = {}
    for segment in found:
        identity = AgentIdentity.parse(segment.agent)
        if identity is not None and identity.in_slurm:
            starts.setdefault((identity.job, identity.restarts), []).append(segment)
    for (job, restarts), own in starts.items():
        before = [each for (other, count), each in starts.items() if other == job and count < restarts]
        if not before:
            continue
        ended = max(segment.end for each in before for segment in each)
        agents = {segment.agent: segment for segment in reversed(own)}
        for agent, first in agents.items():
            if first.start > ended:
                yield Segment(first.node, agent, ended, first.start, Bucket.QUEUE)
