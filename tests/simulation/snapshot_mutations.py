"""Mistakes that decisions about snapshots and checkpoints could have, which the simulation has to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from slurm_elastic.snapshot import lineage, memory, replication
from slurm_elastic.snapshot.disk import lineage as checkpoint_lineage
from slurm_elastic.snapshot.disk.lineage import Start
from slurm_elastic.snapshot.lineage import Copy, Origin, Protection, SnapshotId
from slurm_elastic.snapshot.replication import Goal, Report
from tests.simulation.mutations import (
    MUTATIONS,
    after,
    copies,
    copies_in_two_slots,
    exchange,
    mutation,
    rounds_with_snapshots,
)

__all__ = ["MUTATIONS"]

SLOT_TO_WRITE, NEXT_GOAL = (lineage, "slot_to_write"), (replication, "next_goal")
snapshots = partial(mutation, among=rounds_with_snapshots)
near_disk = after(1500, copies)


# What a round starts from.


@snapshots("snapshots: any line", "off the line", of=(Origin, "has"))
def any_line(*_: Any) -> bool:
    return True


@snapshots("snapshots: line without steps", "off the line", "overwritten", of=(Origin, "has"))
def line_without_steps(_: Any, origin: Origin, snapshot: SnapshotId) -> bool:
    return any(snapshot.round == last.round for last in origin.line)


@snapshots("snapshots: no line", "lost", of=(Origin, "has"))
def no_line(*_: Any) -> bool:
    return False


@snapshots("snapshots: line that forgets nothing", "off the line", of=(lineage, "choose"))
def line_that_forgets_nothing(right: Any, last_round: int | None, before: str, *arguments: Any) -> str:
    found = lineage.read_origin(right(last_round, before, *arguments))
    return lineage.write(found if found.copy is not None else Origin(line=lineage.read_origin(before).line))


@snapshots("snapshots: failures are ignored", "repeated", of=(lineage, "choose"))
def failures_are_ignored(right: Any, last_round: int | None, before: str, inventories: Any, failed: bool) -> str:
    return right(last_round, before, inventories, False)


@snapshots("snapshots: differing copies", "mixed", "lost", of=(lineage, "choose"))
def differing_copies(right: Any, *arguments: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        exchange(patch, lineage, "read_inventories", _without_digests)
        return right(*arguments)


def _without_digests(right: Any, inventories: Sequence[str]) -> list[lineage.Inventory]:
    return [
        replace(found, copies=tuple(Copy(copy.id, "0" * 16) for copy in found.copies)) for found in right(inventories)
    ]


@snapshots("snapshots: nothing is cleared", "overwritten", of=(Origin, "keeps"))
def nothing_is_cleared(*_: Any) -> bool:
    return True


@snapshots("snapshots: nothing is fetched", "torn", of=(lineage, "prepare"))
def nothing_is_fetched(right: Any, *arguments: Any) -> tuple[int | None, bool]:
    return right(*arguments)[0], False


@snapshots("snapshots: newest is overwritten", "overwritten", of=SLOT_TO_WRITE)
def newest_is_overwritten(_: Any, held: Sequence[SnapshotId | None], *_protected: object) -> int:
    return max(range(len(held)), key=lambda slot: held[slot] or SnapshotId(-1, 0))


@snapshots("snapshots: one slot", "overwritten", of=SLOT_TO_WRITE)
def one_slot(*_: Any) -> int:
    return 0


@snapshots("snapshots: old commit stays while written", "torn", "mixed", "off the line", of=(memory, "fill_slot"))
def old_commit_stays_while_written(right: Any, fields: Any, written: Any, copy: Callable[[], object]) -> None:
    copy()
    right(fields, written, lambda: None)


@snapshots("snapshots: committed before written", "torn", "mixed", of=(memory, "fill_slot"))
def committed_before_written(right: Any, fields: Any, written: Any, copy: Callable[[], object]) -> None:
    right(fields, written, lambda: None)
    copy()


# What it starts from on disk.


@snapshots("snapshots: any checkpoint", "off the line on disk", of=(Start, "has"))
def any_checkpoint(*_: Any) -> bool:
    return True


@snapshots("snapshots: checkpoints without steps", "off the line on disk", of=(Start, "has"))
def checkpoints_without_steps(_: Any, start: Start, checkpoint: Any) -> bool:
    return checkpoint.start in (start.number, *(last.start for last in start.line))


@snapshots("snapshots: only own checkpoints", "lost on disk", of=(Start, "has"))
def only_own_checkpoints(_: Any, start: Start, checkpoint: Any) -> bool:
    return checkpoint.start == start.number


@snapshots("snapshots: largest step", "off the line on disk", of=(checkpoint_lineage, "choose_checkpoint"))
def largest_step(_: Any, newest: Start | None, present: Any, below: int | None) -> Any:
    usable = (each for each in present if below is None or each.step < below)
    return max(usable, key=lambda each: each.step, default=None)


@snapshots(
    "snapshots: line from the newest start",
    "off the line on disk",
    "lost on disk",
    of=(checkpoint_lineage, "line_from_memory"),
)
def line_from_the_newest_start(right: Any, starts: Sequence[Start], run: str, round_: int, step: int) -> Any:
    return right([starts[0]], starts[0].run, starts[0].round, step) if starts else ()


@snapshots("snapshots: failures are ignored on disk", "repeated on disk", of=(checkpoint_lineage, "choose_checkpoint"))
def failures_are_ignored_on_disk(right: Any, newest: Start | None, present: Any, below: int | None) -> Any:
    return right(newest, present)


@snapshots("snapshots: newest checkpoints are deleted", "lost on disk", of=(checkpoint_lineage, "deletable"))
def newest_checkpoints_are_deleted(_: Any, newest: Start, present: Any, keep: int) -> Any:
    return sorted(each for each in present if newest.has(each))[keep:]


# Copies on other nodes, and steps that all nodes write to disk.


@mutation("copies: they go to the next node", "lost", of=(replication, "partners"), among=copies)
def copies_go_to_the_next_node(right: Any, reports: dict[int, Report]) -> dict[int, int]:
    return right({rank: replace(report, domain="") for rank, report in reports.items()})


@mutation("copies: they go by the outermost domain", "lost", of=(replication, "partners"), among=copies)
def copies_go_by_the_outermost_domain(right: Any, reports: dict[int, Report]) -> dict[int, int]:
    return right({rank: replace(report, domain=report.domain[:2]) for rank, report in reports.items()})


def chosen_as(change: Callable[[Origin, Origin], Origin], right: Any, last: int, before: str, held: Any) -> str:
    """Choose what a round starts from, and change it; `change` gets that of the round before, too."""
    return lineage.write(change(lineage.read_origin(right(last, before, held)), lineage.read_origin(before)))


@mutation("copies: what is lost is not named", "lost on disk", of=(lineage, "choose"), among=near_disk)
def what_is_lost_is_not_named(*arguments: Any) -> str:
    return chosen_as(lambda origin, before: replace(origin, lost=None), *arguments)


@mutation("copies: what was lost before is forgotten", "lost on disk", of=(lineage, "choose"), among=near_disk)
def what_was_lost_before_is_forgotten(*arguments: Any) -> str:
    # A round that has started from disk takes no snapshot.
    return chosen_as(
        lambda origin, before: replace(origin, lost=None) if origin.copy == before.copy else origin, *arguments
    )


@mutation(
    "copies: only what is lost is looked for on disk",
    "lost on disk",
    of=(checkpoint_lineage, "checkpoint_between"),
    among=near_disk,
)
def only_what_is_lost_is_looked_for(right: Any, starts: Any, run: str, _: Any, lost: SnapshotId, present: Any) -> Any:
    return right(starts, run, replace(lost, step=lost.step - 1), lost, present)


# A node that was cut off comes back with later steps of a round that the run has gone on from earlier.
mutation("copies: steps are forgotten", "off the line", of=(Origin, "has"), among=copies)(line_without_steps)
mutation("copies: any step is on the line", "off the line", of=(Origin, "has"), among=copies)(any_line)


@mutation("copies: what is written may be overwritten", "not on disk", of=SLOT_TO_WRITE, among=copies)
def what_is_written_may_be_overwritten(right: Any, held: Any, busy: Any = (), protection: Any = None) -> int | None:
    return right(held, (), protection or Protection())


@mutation("copies: a step is written before all keep it", "not on disk", of=NEXT_GOAL, among=copies)
def one_wants_it(right: Any, goal: Goal, reports: dict[int, Report], *nodes: Any, **more: Any) -> Goal:
    kept = [report.kept for report in reports.values() if report.wanted and report.kept is not None]
    found = right(goal, reports, *nodes, **more)
    return replace(found, disk=kept[0]) if kept else found


@mutation("copies: nothing is protected", "not safe", "not on disk", of=SLOT_TO_WRITE, among=copies)
def nothing_is_protected(right: Any, held: Any, busy: Any = (), protection: Any = None) -> int | None:
    return right(held, busy)


@mutation("copies: what is safe is not protected", "not safe", of=SLOT_TO_WRITE, among=copies)
def safe_is_not_protected(right: Any, held: Any, busy: Any = (), protection: Any = None) -> int | None:
    return right(held, busy, replace(protection or Protection(), safe=None))


@mutation("copies: newest is overwritten", "not complete", of=SLOT_TO_WRITE, among=copies)
def newest_step_is_overwritten(_: Any, held: Any, busy: Any = (), protection: Any = None) -> int | None:
    protection = protection or Protection()
    kept = {each for each in (protection.safe, protection.kept(held)) if each is not None}
    free = [slot for slot in range(len(held)) if slot not in busy and held[slot] not in kept]
    return max(free, key=lambda slot: held[slot] or SnapshotId(-1, 0), default=None)


mutation("two slots: what is safe is not protected", "not safe", of=SLOT_TO_WRITE, among=copies_in_two_slots)(
    safe_is_not_protected
)
mutation("two slots: newest is overwritten", "not complete", of=SLOT_TO_WRITE, among=copies_in_two_slots)(
    newest_step_is_overwritten
)


@mutation("copies: any copy is overwritten", "not safe", of=(replication, "slot_for_replica"), among=copies)
def any_replica_is_overwritten(right: Any, held: Sequence[Copy | None], safe: SnapshotId | None) -> int:
    return right(held, None)


@mutation("copies: own knowledge is enough", "not safe", of=(replication, "newest_of"), among=copies)
def own_knowledge_is_enough(_: Any, first: SnapshotId | None, second: SnapshotId | None) -> SnapshotId | None:
    return second


@mutation("copies: kept is safe", "not safe", of=NEXT_GOAL, among=copies)
def kept_is_safe(right: Any, goal: Goal, reports: dict[int, Report], *nodes: Any, **more: Any) -> Goal:
    return right(goal, {rank: replace(each, copied=each.kept) for rank, each in reports.items()}, *nodes, **more)


@mutation("copies: steps may differ", "not safe", "not on disk", of=NEXT_GOAL, among=copies)
def steps_may_differ(right: Any, goal: Goal, reports: dict[int, Report], *nodes: Any, **more: Any) -> Goal:
    same = {
        rank: each if each.kept is None else replace(each, kept=goal.take, copied=goal.take)
        for rank, each in reports.items()
    }
    return right(goal, same, *nodes, **more)


@mutation("copies: parts may be missing", "not covered", of=(lineage, "_missing"), among=copies)
def parts_may_be_missing(*_: Any) -> tuple[int, ...]:
    return ()


@mutation("copies: the origin is protected", "lost", of=(Origin, "protected"), among=copies)
def the_origin_is_protected(_: Any, origin: Origin) -> SnapshotId | None:
    # Of the last steps before a node joins no other node has copies.
    return None if origin.copy is None else origin.copy.id


@mutation("copies: one copy is safe", "lost", of=(lineage, "_are_twice"), among=copies)
def once_is_safe(*_: Any) -> bool:
    return True
