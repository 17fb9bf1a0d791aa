"""The time of every node of a run, by what it was spent on. Pure.

The time of an agent, from the start of its process to its end, is cut into segments without gaps, so the buckets add up
to the node time. Times are seconds since 1970 of each node's own clock; only the end of an agent that was lost is the
leader's.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.control.agent_side import TimeUse
from slurm_elastic.observe.records import Event, RunRecords, Worker, identity_of


class Bucket(enum.Enum):
    """The uses of node time, by the names of ml-goodput where it has one."""

    PRODUCTIVE = "productive"
    """Steps that counted, but for the following four."""
    COLLECTIVES = "collectives"
    """In steps that counted: asleep, which is waiting for other ranks, the network, or input that is not marked."""
    DATA_LOADING = "data_loading"
    """Waiting for input."""
    CHECKPOINT_SAVE = "checkpoint_save"
    """Writing checkpoints."""
    CHECKPOINT_RESTORE = "checkpoint_restore"
    """Reading checkpoints, most of it before the first step of a round."""
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
    """From the last step of an agent, or from its leave if it had no workers then, to the end of its process."""
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
        worker: The one that has told most: all ranks take the same steps, but one whose agent was lost has told less.
        complete: False if all of its agents were lost: it may have taken more steps than the last report says.
        redone: How many of its steps later rounds have taken again; None if that is unknown.
        unsaved: How many of its steps the newest checkpoint lacked when the workers were told to stop; None if they
            were not told to, or if that is unknown.
        first: Median time of the first steps of its workers, in seconds since they started.
        before_first: Mean use of the time of its workers before the first step; None if it is not measured.
        shares: The same as shares of the time from the first step to the last.
    """

    number: int
    worker: Worker = field(default_factory=Worker)
    complete: bool = True
    redone: int | None = None
    unsaved: int | None = None
    first: float | None = None
    before_first: TimeUse | None = None
    shares: TimeUse | None = None

    def share(self, steps: int | None) -> float:
        """Return which share of its steps so many are; 0 if the script does not count them."""
        if not steps or self.worker.first_step is None or self.worker.step is None:
            return 0.0
        return min(1.0, steps / (self.worker.step - self.worker.first_step + 1))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Node time in seconds by bucket.

    Attributes:
        redone_steps: Number of steps that were taken again, without those that followed the last report of a round
            that is not complete; None if that is unknown.
        without_planned_stops: What would have been without planned stops, with the newest checkpoint at each change:
            steps taken again, and node time in seconds that would have gone to them. None if that is unknown.
    """

    seconds: Mapping[Bucket, float] = field(default_factory=dict)
    redone_steps: int | None = None
    without_planned_stops: tuple[int, float] | None = None
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
        return self._counted() / self.node_seconds if self.node_seconds else None

    @property
    def share_without_planned_stops(self) -> float | None:
        """The same without planned stops, each change going on from the newest checkpoint; None if unknown."""
        if self.without_planned_stops is None or self.share is None:
            return None
        _, lost = self.without_planned_stops
        return max(0.0, self._counted() - lost) / self.node_seconds

    def _counted(self) -> float:
        return self.seconds.get(Bucket.PRODUCTIVE, 0.0) + self.seconds.get(Bucket.COLLECTIVES, 0.0)


def round_progress(records: RunRecords) -> dict[int, RoundProgress]:
    """Return the steps of each round, as its agents have recorded them."""
    workers: dict[int, list[Worker]] = {}
    for event in records.progress:
        if event.round is not None:
            workers.setdefault(event.round, []).extend(event.workers)
    stepping = {number: [w for w in of_round if w.reports and w.steps] for number, of_round in workers.items()}
    furthest = {
        number: max(
            stepping[number],
            key=lambda worker: worker.steps,
            default=Worker(reports=any(worker.reports for worker in of_round)),
        )
        for number, of_round in workers.items()
    }
    ended = {event.round for event in records.progress if event.kind == "workers_ended"}
    unsaved = _unsaved(records, furthest)
    rounds = {}
    for number, of_round in stepping.items():
        firsts = [worker.first for worker in of_round if worker.first is not None]
        rounds[number] = RoundProgress(
            number,
            furthest[number],
            complete=not of_round or number in ended or number == max(workers),
            redone=_redone(number, furthest),
            unsaved=unsaved.get(number),
            first=statistics.median(firsts) if firsts else None,
            before_first=_mean([worker.before_first for worker in of_round]),
            shares=_mean([_shares(worker) for worker in of_round]),
        )
    return rounds


def last_step(rounds: Iterable[RoundProgress]) -> int:
    """Return the last step of a run; the number of its steps if the script does not count them."""
    workers = [round_.worker for round_ in rounds]
    reached = [worker.step for worker in workers if worker.step is not None]
    return max(reached) if reached else sum(worker.steps for worker in workers)


def segments(records: RunRecords, now: float) -> tuple[Segment, ...]:
    """Return the time of all agents and of the queue, without gaps; that of agents that still run ends now."""
    steps = round_progress(records)
    by_agent: dict[str, list[Event]] = {}
    for event in records.progress:
        by_agent.setdefault(event.agent, []).append(event)
    by_agent.pop("", None)
    spans: list[Segment] = []
    for agent, own in by_agent.items():
        spans += _agent_segments(agent, own, _end(own, records, now), records, steps)
    return (*spans, *_queue(spans))


def goodput(spans: Iterable[Segment], steps: Mapping[int, RoundProgress]) -> Goodput:
    """Add up segments."""
    seconds = dict.fromkeys(Bucket, 0.0)
    counted: dict[int, float] = {}
    for segment in spans:
        seconds[segment.bucket] += segment.seconds
        if segment.round is not None:
            steps_of_it = segment.seconds if segment.bucket in (Bucket.PRODUCTIVE, Bucket.COLLECTIVES) else 0.0
            counted[segment.round] = counted.get(segment.round, 0.0) + steps_of_it
    mine = [steps[number] for number in sorted(counted.keys() & steps.keys())]
    redone = [round_.redone for round_ in mine if round_.redone is not None]
    taken_again, without_planned_stops = sum(redone) if redone else None, None
    if taken_again is not None:
        lost = sum(round_.share(round_.unsaved) * counted[round_.number] for round_ in mine)
        without_planned_stops = taken_again + sum(round_.unsaved or 0 for round_ in mine), lost
    return Goodput(seconds, taken_again, without_planned_stops, tuple(_missing(mine)))


def _missing(rounds: Sequence[RoundProgress]) -> Iterator[str]:
    if any(not round_.worker.reports for round_ in rounds):
        yield (
            "steps, checkpoints, data loading, collectives: scripts that do not use slurm_elastic.trainer report none; "
            "their time is in the bucket unreported"
        )
    if any(round_.worker.steps and round_.worker.step is None for round_ in rounds):
        yield "wasted progress: scripts call should_stop without a step, so steps that were taken again are unknown"
    stepping = [round_ for round_ in rounds if round_.worker.steps]
    incomplete = [str(round_.number) for round_ in stepping if not round_.complete]
    if incomplete:
        yield (
            f"some of the steps that were taken again: all agents of {_numbered(incomplete)} were lost, and their last "
            "report is older"
        )
    unmeasured = [str(round_.number) for round_ in stepping if round_.shares is None]
    if unmeasured:
        yield (
            f"data loading, checkpoint save and restore, collectives: not measured in {_numbered(unmeasured)}, and "
            "part of the other buckets; workers have an older slurm_elastic, SLURM_ELASTIC_TIME_USE=off, or a kernel "
            "without schedstat, or all agents were lost"
        )
    unknown = [str(round_.number) for round_ in stepping if round_.shares is not None and round_.shares.waiting is None]
    if unknown:
        yield f"collectives: unknown on GPUs, in {_numbered(unknown)}; part of the steps that counted"
    yield "queue before the first start of a job: only Slurm's accounting knows it"


def _numbered(rounds: Sequence[str]) -> str:
    shown = ", ".join(rounds[:8]) + (", ..." if len(rounds) > 8 else "")
    return f"round{'s' if len(rounds) > 1 else ''} {shown}"


def _mean(uses: Sequence[TimeUse | None]) -> TimeUse | None:
    """Return the mean of what is known; its `waiting` is None unless all know it."""
    measured = [use for use in uses if use is not None]
    if not measured:
        return None
    waiting, *others = (statistics.fmean(seconds or 0.0 for seconds in part) for part in zip(*measured, strict=True))
    return TimeUse(None if any(use.waiting is None for use in measured) else waiting, *others)


def _shares(worker: Worker) -> TimeUse | None:
    """Return the use of the time from the first step of a worker to its last, as shares of it."""
    use, seconds = worker.since_first, worker.seconds
    if use is None or not seconds:
        return None
    parts = [part or 0.0 for part in use]
    # What comes after the last step counts, too, such as the last checkpoint.
    whole = max(seconds, sum(parts))
    waiting, *others = (part / whole for part in parts)
    return TimeUse(None if use.waiting is None else waiting, *others)


def _redone(number: int, rounds: Mapping[int, Worker]) -> int | None:
    first, last = rounds[number].first_step, rounds[number].step
    if first is None or last is None:
        return None
    later = [other.first_step for key, other in rounds.items() if key > number and other.first_step is not None]
    return max(0, last - max(min(later, default=last + 1), first) + 1)


def _unsaved(records: RunRecords, rounds: Mapping[int, Worker]) -> dict[int, int]:
    """Return the steps that were not saved yet, of each round that ended as planned and was not the last one."""
    reports = (event for event in records.progress if event.kind == "progress")
    checkpoints = {event.round: event.workers[0].checkpoint for event in reports}
    newest = max((number for number, worker in rounds.items() if worker.steps), default=-1)
    unsaved = {}
    for event in records.events:
        number = event.round
        if number is None or number not in rounds or number >= newest:
            continue
        if event.kind == "round_ended" and event.whole("step"):
            first, last = rounds[number].first_step, rounds[number].step
            if first is not None and last is not None:
                # Before the first checkpoint of a round there is only that with which it began.
                saved = checkpoints.get(number)
                unsaved[number] = last - max(first - 1 if saved is None else saved, first - 1)
    return unsaved


_GONE = frozenset({"node_lost", "node_left", "leader_changed"})
"""Events that name the nodes whose agents are gone; a leader that was lost has no other one."""


def _end(own: Sequence[Event], records: RunRecords, now: float) -> float:
    """Return when an agent ended: by its own record, when it was lost, or when the run was over."""
    last = own[-1]
    if last.kind == "agent_ended":
        return last.time
    mine = identity_of(last.agent)
    starts = [(identity_of(event.agent), event) for event in records.progress if event.kind == "agent_started"]
    starts = [(other, event) for other, event in starts if other.job == mine.job and other.restarts > mine.restarts]
    begun = (event.time - (event.number("seconds") or 0.0) for _, event in starts)
    later = [time for time in begun if time > last.time]
    # What happens on the node after the next start of the job happens to another agent.
    before_next = min(later, default=math.inf)
    for event in records.events:
        if last.time <= event.time < before_next and event.kind in _GONE and last.node in event.nodes:
            return event.time
    over = records.done is not None or any(
        event.kind == "run_ended" and event.time >= last.time for event in records.events
    )
    if not later and not over:
        return max(now, last.time)
    if last.kind == "agent_started" and not any(
        event.kind == "node_spare" and event.time >= last.time and last.node in event.nodes for event in records.events
    ):
        # It was killed before the leader knew of it.
        return last.time
    # When it was killed is unknown.
    events = (*records.progress, *records.events)
    return max((event.time for event in events if last.time <= event.time < before_next), default=last.time)


def _agent_segments(
    agent: str, own: Sequence[Event], end: float, records: RunRecords, steps: Mapping[int, RoundProgress]
) -> Iterator[Segment]:
    node, first = own[0].node, own[0]
    at = first.time - (first.number("seconds") or 0.0 if first.kind == "agent_started" else 0.0)
    begins_with = Bucket.INITIALIZATION
    spare = [event.time for event in records.events if event.kind == "node_spare" and node in event.nodes]

    def until(to: float, bucket: Bucket, round_: int | None = None) -> Iterator[Segment]:
        nonlocal at
        to = min(max(to, at), max(end, at))
        if to > at:
            yield Segment(node, agent, at, to, bucket, round_)
            at = to

    def waiting(to: float) -> Iterator[Segment]:
        waits = (time for time in spare if at <= time <= to)
        yield from until(next(waits, to), begins_with)
        yield from until(to, Bucket.SPARE)

    starts = [event for event in own if event.kind == "workers_started"]
    for started in starts:
        yield from waiting(started.time)
        number = started.round
        ended = next(
            (e for e in own if e.kind == "workers_ended" and e.round == number and e.time >= started.time), None
        )
        over = ended.time if ended is not None else end
        progress = steps.get(-1 if number is None else number, RoundProgress(-1))
        workers = [worker for worker in ended.workers if worker.reports] if ended is not None else []
        mine = workers[0] if workers else Worker()
        begun = mine.first or progress.first
        if begun is None or not progress.worker.reports:
            # No step was taken, as far as is known.
            yield from until(over, begins_with if progress.worker.reports else Bucket.UNREPORTED, number)
        else:
            first_step = started.time + begun
            before = _mean([worker.before_first for worker in workers]) or progress.before_first or TimeUse()
            for bucket, seconds in _start_parts(begins_with, max(0.0, first_step - at), before):
                yield from until(at + seconds, bucket, number)
            last = started.time + mine.last if mine.last is not None else over
            shares = _mean([_shares(worker) for worker in workers]) or progress.shares or TimeUse()
            steps_seconds = max(0.0, min(last, end) - at)
            for bucket, share in _step_parts(progress.share(progress.redone), shares):
                yield from until(at + share * steps_seconds, bucket, number)
        begins_with = Bucket.RECOVERY
    if not starts or any(time >= at for time in spare):
        yield from waiting(next((event.time for event in own if event.kind == "agent_ended"), end))
    yield from until(end, Bucket.SHUTDOWN)


def _start_parts(rest: Bucket, seconds: float, use: TimeUse) -> Iterator[tuple[Bucket, float]]:
    parts = ((Bucket.CHECKPOINT_RESTORE, use.restoring), (Bucket.DATA_LOADING, use.loading))
    total = sum(part for _, part in parts)
    scale = min(1.0, seconds / total) if total else 0.0
    yield rest, max(0.0, seconds - total)
    for bucket, part in parts:
        yield bucket, part * scale


def _step_parts(wasted: float, shares: TimeUse) -> Iterator[tuple[Bucket, float]]:
    """Cut the time from the first step to the last, as shares of it. Where in it each part was is unknown."""
    parts = (
        (Bucket.COLLECTIVES, shares.waiting or 0.0),
        (Bucket.DATA_LOADING, shares.loading),
        (Bucket.CHECKPOINT_SAVE, shares.saving),
        (Bucket.CHECKPOINT_RESTORE, shares.restoring),
    )
    counted = 1 - wasted
    yield Bucket.PRODUCTIVE, counted * max(0.0, 1 - sum(share for _, share in parts))
    for bucket, share in parts:
        yield bucket, counted * share
    yield Bucket.WASTED, wasted


def _queue(spans: Sequence[Segment]) -> Iterator[Segment]:
    """Yield the time between the starts of a job, for each node that it got by the later one."""
    starts: dict[tuple[str, int], list[Segment]] = {}
    for segment in spans:
        identity = identity_of(segment.agent)
        if identity.job not in ("", "0"):
            starts.setdefault((identity.job, identity.restarts), []).append(segment)
    for (job, restarts), own in starts.items():
        earlier = (spans for (other, count), spans in starts.items() if other == job and count < restarts)
        ended = max((segment.end for spans in earlier for segment in spans), default=math.inf)
        for agent, first in {segment.agent: segment for segment in reversed(own)}.items():
            if first.start > ended:
                yield Segment(first.node, agent, ended, first.start, Bucket.QUEUE)
