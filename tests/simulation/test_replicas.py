"""No schedule overwrites what is safe or restores what is not whole, and each mistake in a decision is found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from slurm_elastic.snapshot import lineage, replication
from slurm_elastic.snapshot.disk import lineage as checkpoint_lineage
from slurm_elastic.snapshot.disk.lineage import CheckpointId, Start
from slurm_elastic.snapshot.lineage import Copy, Origin, Protection, SnapshotId
from slurm_elastic.snapshot.replication import Goal, Report
from tests.simulation.replicas import play
from tests.simulation.snapshots import KINDS, ViolationError

SEEDS = range(1500, 3000)
"""Those before do not come near the rarest mistake."""


def play_all(seeds: Sequence[int] = SEEDS, slots: int | None = None, ahead: int = 1) -> int:
    """Play schedules, with these slots on all nodes if it is given; returns how many steps became safe."""
    return sum(play(seed, None if slots is None else (slots,), ahead) for seed in seeds)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_is_safe_stays_and_what_is_restored_is_whole(kind: int) -> None:
    seeds = SEEDS[kind :: len(KINDS)]
    # Else nothing was tried.
    assert play_all(seeds) > len(seeds)


def test_a_node_with_two_slots_needs_ranks_that_are_one_step_ahead_at_most() -> None:
    play_all(SEEDS[::10], slots=3, ahead=2)
    with pytest.raises(ViolationError, match="not complete"):
        play_all(SEEDS[::10], slots=2, ahead=2)


def _nothing_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.slot_to_write

    def slot_to_write(
        held: Sequence[SnapshotId | None], busy: Collection[int] = (), protection: Protection | None = None
    ) -> int | None:
        return real(held, busy)

    monkeypatch.setattr(lineage, "slot_to_write", slot_to_write)


def _safe_is_not_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.slot_to_write

    def slot_to_write(
        held: Sequence[SnapshotId | None], busy: Collection[int] = (), protection: Protection | None = None
    ) -> int | None:
        return real(held, busy, replace(protection or Protection(), safe=None))

    monkeypatch.setattr(lineage, "slot_to_write", slot_to_write)


def _the_origin_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last steps before a node joins no other node has copies."""
    monkeypatch.setattr(Origin, "protected", property(lambda origin: None if origin.copy is None else origin.copy.id))


def _once_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "_are_twice", lambda copy, inventories: True)


def _newest_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def slot_to_write(
        held: Sequence[SnapshotId | None], busy: Collection[int] = (), protection: Protection | None = None
    ) -> int | None:
        protection = protection or Protection()
        kept = {each for each in (protection.safe, protection.kept(held)) if each is not None}
        free = [slot for slot in range(len(held)) if slot not in busy and held[slot] not in kept]
        return max(free, key=lambda slot: held[slot] or SnapshotId(-1, 0), default=None)

    monkeypatch.setattr(lineage, "slot_to_write", slot_to_write)


def _any_replica_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replication.slot_for_replica

    def slot(held: Sequence[Copy | None], safe: SnapshotId | None) -> int:
        return real(held, None)

    monkeypatch.setattr(replication, "slot_for_replica", slot)


def _own_knowledge_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "newest_of", lambda first, second: second)


def _changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Goal, Report], Report]) -> None:
    real = replication.next_goal

    def next_goal(goal: Goal, reports: Mapping[int, Report], nodes: int, *, replicates: bool = True) -> Goal:
        changed = {rank: change(goal, report) for rank, report in reports.items()}
        return real(goal, changed, nodes, replicates=replicates)

    monkeypatch.setattr(replication, "next_goal", next_goal)


def _kept_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, lambda goal, report: replace(report, copied=report.kept))


def _steps_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(
        monkeypatch,
        lambda goal, report: report if report.kept is None else replace(report, kept=goal.take, copied=goal.take),
    )


def _parts_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "_missing", lambda parts, sources: ())


def _steps_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was cut off comes back with later steps of a round that the run has gone on from earlier."""

    def has(origin: Origin, snapshot: SnapshotId) -> bool:
        return any(snapshot.round == last.round for last in origin.line)

    monkeypatch.setattr(Origin, "has", has)


def _any_step_is_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "has", lambda origin, snapshot: True)


def _what_is_written_may_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.slot_to_write

    def slot_to_write(
        held: Sequence[SnapshotId | None], busy: Collection[int] = (), protection: Protection | None = None
    ) -> int | None:
        return real(held, (), protection or Protection())

    monkeypatch.setattr(lineage, "slot_to_write", slot_to_write)


def _a_step_is_written_before_all_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replication.next_goal

    def next_goal(goal: Goal, reports: Mapping[int, Report], nodes: int, *, replicates: bool = True) -> Goal:
        found = real(goal, reports, nodes, replicates=replicates)
        kept = [report.kept for report in reports.values() if report.wanted and report.kept is not None]
        return replace(found, disk=kept[0]) if kept else found

    monkeypatch.setattr(replication, "next_goal", next_goal)


def _what_is_lost_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _chosen(monkeypatch, lambda origin, before: replace(origin, lost=None))


def _what_was_lost_before_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that has started from disk takes no snapshot."""
    _chosen(monkeypatch, lambda origin, before: replace(origin, lost=None) if origin.copy == before.copy else origin)


def _chosen(monkeypatch: pytest.MonkeyPatch, change: Callable[[Origin, Origin], Origin]) -> None:
    real = lineage.choose

    def choose(last_round: int | None, before: str, inventories: Sequence[str]) -> str:
        found = lineage.read_origin(real(last_round, before, inventories))
        return lineage.write(change(found, lineage.read_origin(before)))

    monkeypatch.setattr(lineage, "choose", choose)


def _only_what_is_lost_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint_lineage.checkpoint_between

    def between(
        starts: Sequence[Start], run: str, held: SnapshotId, lost: SnapshotId, present: Iterable[CheckpointId]
    ) -> CheckpointId | None:
        return real(starts, run, replace(lost, step=lost.step - 1), lost, present)

    monkeypatch.setattr(checkpoint_lineage, "checkpoint_between", between)


def _copies_go_to_the_next_node(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replication.partners

    def partners(reports: Mapping[int, Report]) -> dict[int, int]:
        return real({rank: replace(report, domain="") for rank, report in reports.items()})

    monkeypatch.setattr(replication, "partners", partners)


def _copies_go_by_the_outermost_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replication.partners

    def partners(reports: Mapping[int, Report]) -> dict[int, int]:
        return real({rank: replace(report, domain=report.domain[:2]) for rank, report in reports.items()})

    monkeypatch.setattr(replication, "partners", partners)


@pytest.mark.parametrize(
    ("mistake", "promise"),
    [
        (_copies_go_to_the_next_node, "lost: "),
        (_copies_go_by_the_outermost_domain, "lost: "),
        (_what_is_lost_is_not_named, "lost on disk"),
        (_what_was_lost_before_is_forgotten, "lost on disk"),
        (_only_what_is_lost_is_looked_for, "lost on disk"),
        (_steps_are_forgotten, "off the line"),
        (_any_step_is_on_the_line, "off the line"),
        (_what_is_written_may_be_overwritten, "not on disk"),
        (_a_step_is_written_before_all_keep_it, "not on disk"),
        (_nothing_is_protected, "not safe|not on disk"),
        (_safe_is_not_protected, "not safe"),
        (_newest_is_overwritten, "not complete"),
        (_any_replica_is_overwritten, "not safe"),
        (_own_knowledge_is_enough, "not safe"),
        (_kept_is_safe, "not safe"),
        (_steps_may_differ, "not safe|not on disk"),
        (_parts_may_be_missing, "not covered"),
        (_the_origin_is_protected, "lost: "),
        (_once_is_safe, "lost: "),
    ],
)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(ViolationError, match=promise):
        play_all()


@pytest.mark.parametrize(
    ("mistake", "promise"),
    [
        (_safe_is_not_protected, "not safe"),
        (_newest_is_overwritten, "not complete"),
    ],
)
def test_a_mistake_of_nodes_with_two_slots_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(ViolationError, match=promise):
        play_all(slots=2)
