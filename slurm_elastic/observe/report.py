"""The report of a run: rounds with their causes, node time by bucket; as a Chrome trace, and in one line. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from slurm_elastic.agent.event_log import json_number
from slurm_elastic.observe.goodput import (
    Goodput,
    RoundProgress,
    Segment,
    goodput,
    last_step,
    round_progress,
    segments,
)
from slurm_elastic.observe.records import Event, Round, RunRecords, Worker, identity_of
from slurm_elastic.observe.status import slow_by_round, speeds
from slurm_elastic.observe.views import GOES_ON, RunStatus, SlowRankView
from slurm_elastic.slurm.hostlist import natural_key
from slurm_elastic.text import counted, duration_text


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round, until the end of its last worker; `cause` is the line of the event that ended the round before it."""

    round: Round
    start: float
    end: float
    cause: str
    progress: RoundProgress
    slow: tuple[SlowRankView, ...] = ()


class Slice(NamedTuple):
    """The time in which an agent or a rank did one thing, as a trace shows it."""

    node: str
    thread: str
    start: float
    end: float
    name: str
    kind: str
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report shows.

    Attributes:
        starts: The same as `total` for each restart count.
        samples, losses: Time, and steps per second or loss, as the agent of rank 0 has recorded them.
    """

    records: RunRecords
    status: RunStatus
    start: float
    end: float
    rounds: tuple[RoundReport, ...]
    segments: tuple[Segment, ...]
    total: Goodput
    starts: Mapping[int, Goodput]
    samples: tuple[tuple[float, float], ...]
    losses: tuple[tuple[float, float], ...] = ()


def report(records: RunRecords, status: RunStatus, now: float) -> Report:
    """Return the report of a run; the time of agents that still run ends now."""
    until = now if status.state in GOES_ON or status.updated is None else status.updated
    spans, steps = segments(records, until), round_progress(records)
    by_start: dict[int, list[Segment]] = {}
    for segment in spans:
        by_start.setdefault(identity_of(segment.agent).restarts, []).append(segment)
    losses = ((event.time, worker.loss) for event in records.progress for worker in event.workers if worker.rank == 0)
    return Report(
        records=records,
        status=status,
        start=min((segment.start for segment in spans), default=until),
        end=max((segment.end for segment in spans), default=until),
        rounds=_rounds(records, steps, until),
        segments=spans,
        total=goodput(spans, steps),
        starts={number: goodput(own, steps) for number, own in sorted(by_start.items())},
        samples=speeds(records.progress),
        losses=tuple((time, loss) for time, loss in losses if loss is not None and math.isfinite(loss)),
    )


def report_json(content: Report) -> dict[str, Any]:
    """Return a report as JSON; docs/events.md has the schema."""
    return {
        "schema": 2,
        "run": content.status.run,
        "state": content.status.state.value,
        "command": list(content.status.command),
        "start": content.start,
        "end": content.end,
        "goodput": _goodput_json(content.total),
        "starts": {str(number): _goodput_json(goodput) for number, goodput in content.starts.items()},
        "domains": {agent.node: agent.domain for agent in content.status.agents},
        "rounds": [
            {
                "round": round_.round.number,
                "start": round_.start,
                "end": round_.end,
                "reason": round_.round.reason,
                "cause": round_.cause,
                "nodes": list(round_.round.nodes),
                "world_size": round_.round.world_size,
                "first_step": round_.progress.worker.first_step,
                "last_step": round_.progress.worker.step,
                "calls": round_.progress.worker.steps,
                "complete": round_.progress.complete,
                "redone_steps": round_.progress.redone,
                "steps_per_second": round_.progress.worker.steps_per_second,
                "slow_ranks": [asdict(slow) for slow in round_.slow],
            }
            for round_ in content.rounds
        ],
        "segments": [asdict(segment) | {"bucket": segment.bucket.value} for segment in content.segments],
        "problems": list(content.status.problems),
    }


def chrome_trace(content: Report) -> dict[str, Any]:
    """Return a report in the Trace Event Format: a process for each node, a thread for each of its agents and ranks.

    Perfetto and chrome://tracing open it. Times are microseconds since the start of the run.
    """
    nodes = sorted({segment.node for segment in content.segments}, key=natural_key)
    pids = {node: number for number, node in enumerate(nodes, 1)}
    agents = dict.fromkeys(segment.agent for segment in content.segments)
    of_ranks = list(_rank_spans(content.records.progress))
    ranks = sorted({part.thread for part in of_ranks}, key=natural_key)
    tids = {name: number for number, name in enumerate([*agents, *ranks], 1)}
    slices = [*map(_of_segment, content.segments), *of_ranks]
    events: list[dict[str, Any]] = []
    for node, pid in pids.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": node}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for node, thread in dict.fromkeys((part.node, part.thread) for part in slices):
        place = {"pid": pids[node], "tid": tids[thread]}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": thread}})
    for node, thread, start, end, name, kind, args in slices:
        # Both ends are rounded: slices of a thread that overlap are errors to Perfetto.
        begin, end = (_micros(time - content.start) for time in (start, end))
        place = {"pid": pids[node], "tid": tids[thread]}
        events.append({"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": end - begin, **place, "args": args})
    for event in content.records.events:
        mark = {"ph": "i", "s": "g", "name": event.text or event.kind, "cat": event.kind}
        events.append({**mark, "ts": _micros(event.time - content.start), "pid": pids.get(event.node, 0), "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": content.status.run}}


def _of_segment(segment: Segment) -> Slice:
    kind, args = segment.bucket.value, {"round": segment.round}
    name = kind if segment.round is None else f"{kind}, round {segment.round}"
    return Slice(segment.node, segment.agent, segment.start, segment.end, name, kind, args)


def _micros(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _goodput_json(content: Goodput) -> dict[str, Any]:
    return {
        "node_seconds": content.node_seconds,
        "share": content.share,
        "seconds": {bucket.value: seconds for bucket, seconds in content.seconds.items()},
        "redone_steps": content.redone_steps,
        "without_planned_stops": {
            "redone_steps": None if content.without_planned_stops is None else content.without_planned_stops[0],
            "share": content.share_without_planned_stops,
        },
        "missing": list(content.missing),
    }


def _rounds(records: RunRecords, steps: Mapping[int, RoundProgress], until: float) -> tuple[RoundReport, ...]:
    formed = {event.round: event.time for event in records.events if event.kind == "round_formed"}
    ended = {event.round: event for event in records.events if event.kind == "round_ended"}
    ends = {event.round: event.time for event in records.progress if event.kind == "workers_ended"}
    slow = slow_by_round(records.events)
    views = []
    neighbours = zip((None, *records.rounds), records.rounds, (*records.rounds[1:], None), strict=False)
    for before, round_, following in neighbours:
        number = round_.number
        if number not in formed:
            continue
        over = formed.get(following.number, until) if following is not None else until
        over = ends.get(number) or (ended[number].time if number in ended else over)
        cause = ended[before.number].text if before is not None and before.number in ended else ""
        progress, start = steps.get(number, RoundProgress(number)), formed[number]
        views.append(RoundReport(round_, start, max(start, over), cause, progress, slow.get(number, ())))
    return tuple(views)


def _rank_spans(progress: Sequence[Event]) -> Iterator[Slice]:
    """Yield what each rank did in each round, as far as its agent has told the end of it."""
    starts = {(event.agent, event.round): event.time for event in progress if event.kind == "workers_started"}
    for ended in progress:
        begun = starts.get((ended.agent, ended.round))
        if ended.kind != "workers_ended" or begun is None:
            continue
        for worker in ended.workers:
            args, at = {"round": ended.round, "loss": json_number(worker.loss), "checkpoint": worker.checkpoint}, begun
            for until, name in _rank_parts(worker, begun, ended.time):
                if min(until, ended.time) > at:
                    title, end = f"{name}, round {ended.round}", min(until, ended.time)
                    yield Slice(ended.node, f"rank {worker.rank}", at, end, title, "rank", args)
                    at = until


def _rank_parts(worker: Worker, begun: float, over: float) -> Iterable[tuple[float, str]]:
    if worker.first is None or worker.last is None:
        return [(over, "workers run")]
    has_steps = worker.first_step is not None and worker.step is not None
    steps = f"steps {worker.first_step} to {worker.step}" if has_steps else f"{worker.steps} steps"
    return [(begun + worker.first, "start"), (begun + worker.last, steps), (over, "end")]


def summary(records: RunRecords, now: float) -> str:
    """Return steps, time, rounds, nodes that came and went, steps taken again, goodput, and the command for more."""
    return f"{', '.join(_summary_parts(records, now))}: slurm-elastic report {records.run_id}"


def _summary_parts(records: RunRecords, now: float) -> Iterator[str]:
    steps, times = round_progress(records), segments(records, now)
    total = last_step(steps.values())
    begin, end = min((span.start for span in times), default=now), max((span.end for span in times), default=now)
    lasted = duration_text(end - begin)
    yield f"{counted(total, 'step')} in {lasted}" if total else lasted
    yield counted(len(records.rounds), "round")
    # A leader that is lost has no event of its own, and one of several that are lost may be in no event of a round.
    lost = _named_nodes(records, "node_lost") | _named_nodes(records, "round_ended", "node_lost")
    requeues = [round_.number for round_ in records.rounds if round_.reason == "requeued"]
    left = _named_nodes(records, "round_ended", "node_left", before=requeues)
    if requeues:
        yield counted(len(requeues), "requeue")
    pairs = zip(records.rounds, records.rounds[1:], strict=False)
    joined = sum(len(set(later.nodes) - set(earlier.nodes)) for earlier, later in pairs)
    for number, how in ((lost.total(), "lost"), (left.total(), "left"), (joined, "joined")):
        if number:
            yield f"{counted(number, 'node')} {how}"
    figures = goodput(times, steps)
    if figures.redone_steps or (figures.redone_steps is not None and (lost or left or requeues)):
        yield f"{counted(figures.redone_steps, 'step')} again"
    if figures.share is not None:
        yield f"goodput {100 * figures.share:.0f} %"


def _named_nodes(records: RunRecords, kind: str, reason: str = "", before: Container[int] = ()) -> Counter[str]:
    """Return how often events of this kind name each node, without those of the round before one of these."""
    events = (
        event
        for event in records.events
        if event.kind == kind and reason in ("", event.word("reason")) and (event.round or 0) + 1 not in before
    )
    return Counter(node for event in events for node in event.nodes)
