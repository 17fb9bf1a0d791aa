"""A run that has ended, in one line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

from slurm_elastic.observe.goodput import goodput, round_progress, segments
from slurm_elastic.observe.records import RunRecords
from slurm_elastic.text import counted, duration_text


def summary(records: RunRecords, now: float) -> str:
    """Return steps, time, rounds, nodes that came and went, steps taken again, goodput, and the command for more.

    Args:
        records: The records of the run.
        now: Seconds since 1970.
    """
    return f"{', '.join(_parts(records, now))}: slurm-elastic report {records.run_id}"


def _parts(records: RunRecords, now: float) -> Iterator[str]:
    steps, times = round_progress(records), segments(records, now)
    reached = [worker.last_step for worker in steps.values() if worker.last_step is not None]
    total = max(reached) if reached else sum(worker.calls for worker in steps.values())
    begin, end = min((span.start for span in times), default=now), max((span.end for span in times), default=now)
    lasted = duration_text(end - begin)
    yield f"{counted(total, 'step')} in {lasted}" if total else lasted
    yield counted(len(records.rounds), "round")
    # A leader that is lost has no event of its own, and one of several that are lost may be in no event of a round.
    lost = _nodes(records, "node_lost") | _nodes(records, "round_ended", "node_lost")
    requeues = [round_.number for round_ in records.rounds if round_.reason == "requeued"]
    left = _nodes(records, "round_ended", "node_left", before=requeues)
    if requeues:
        yield counted(len(requeues), "requeue")
    pairs = zip(records.rounds, records.rounds[1:], strict=False)
    joined = sum(len(set(later.nodes) - set(earlier.nodes)) for earlier, later in pairs)
    for number, how in ((lost.total(), "lost"), (left.total(), "left"), (joined, "joined")):
        if number:
            yield f"{counted(number, 'node')} {how}"
    found = goodput(times, steps)
    if found.redone_steps or (found.redone_steps is not None and (lost or left or requeues)):
        yield f"{counted(found.redone_steps, 'step')} again"
    if found.share is not None:
        yield f"goodput {100 * found.share:.0f} %"


def _nodes(records: RunRecords, kind: str, reason: str = "", before: Container[int] = ()) -> Counter[str]:
    """Return how often events of this kind name each node, without those of the round before one of these."""
    events = (
        event
        for event in records.events
        if event.kind == kind and reason in ("", event.word("reason")) and (event.round or 0) + 1 not in before
    )
    return Counter(node for event in events for node in event.nodes)
