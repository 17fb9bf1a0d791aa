"""No schedule restores torn, mixed or off-lineage state, and each mistake in a decision is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

import pytest

from slurm_elastic.snapshot import lineage, memory
from slurm_elastic.snapshot.disk import lineage as checkpoint_lineage
from slurm_elastic.snapshot.disk.lineage import CheckpointId, Start
from slurm_elastic.snapshot.lineage import Copy, Origin, Preparation, SnapshotId
from tests.simulation.snapshots import ViolationError, play

SCHEDULES = 3000


def play_all() -> None:
    for seed in range(SCHEDULES):
        play(seed)


def test_every_round_starts_from_one_whole_snapshot_of_its_line() -> None:
    play_all()


def _any_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "has", lambda self, snapshot: True)


def _line_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "has", lambda self, id_: any(id_.round == last.round for last in self.line))


def _no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "has", lambda self, snapshot: False)


def _line_that_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.choose

    def choose(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
        found = lineage.read_origin(real(last_round, before, inventories, failed))
        return lineage.write(found if found.copy is not None else Origin(line=lineage.read_origin(before).line))

    monkeypatch.setattr(lineage, "choose", choose)


def _failures_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.choose

    def choose(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
        return real(last_round, before, inventories, False)

    monkeypatch.setattr(lineage, "choose", choose)


def _differing_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.read_inventories

    def same(inventories: Sequence[str]) -> list[lineage.Inventory]:
        return [
            dataclasses.replace(found, copies=tuple(Copy(copy.id, "0" * 16) for copy in found.copies))
            for found in real(inventories)
        ]

    def choose(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
        monkeypatch.setattr(lineage, "read_inventories", same)
        try:
            return chosen(last_round, before, inventories, failed)
        finally:
            monkeypatch.setattr(lineage, "read_inventories", real)

    chosen = lineage.choose
    monkeypatch.setattr(lineage, "choose", choose)


def _nothing_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.prepare

    def prepare(held: Sequence[Copy | None], origin: Origin) -> Preparation:
        return dataclasses.replace(real(held, origin), clear=())

    monkeypatch.setattr(lineage, "prepare", prepare)


def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lineage.prepare

    def prepare(held: Sequence[Copy | None], origin: Origin) -> Preparation:
        return dataclasses.replace(real(held, origin), fetch=False)

    monkeypatch.setattr(lineage, "prepare", prepare)


def _newest_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def slot_to_write(held: Sequence[SnapshotId | None], *protected: object) -> int:
        return max(range(len(held)), key=lambda slot: held[slot] or SnapshotId(-1, 0))

    monkeypatch.setattr(lineage, "slot_to_write", slot_to_write)


def _one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "slot_to_write", lambda *held: 0)


def _old_commit_stays_while_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(fields: memory.Fields, written: memory.Contents, copy: Callable[[], object]) -> None:
        copy()
        real(fields, written, lambda: None)

    real = memory.fill_slot
    monkeypatch.setattr(memory, "fill_slot", fill)


def _committed_before_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(fields: memory.Fields, written: memory.Contents, copy: Callable[[], object]) -> None:
        real(fields, written, lambda: None)
        copy()

    real = memory.fill_slot
    monkeypatch.setattr(memory, "fill_slot", fill)


def _any_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Start, "has", lambda self, checkpoint: True)


def _checkpoints_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(self: Start, id_: CheckpointId) -> bool:
        return id_.start == self.number or any(id_.start == last.start for last in self.line)

    monkeypatch.setattr(Start, "has", has)


def _only_own_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Start, "has", lambda self, id_: id_.start == self.number)


def _largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(newest: Start | None, present: Iterable[CheckpointId], below: int | None) -> CheckpointId | None:
        usable = (each for each in present if below is None or each.step < below)
        return max(usable, key=lambda each: each.step, default=None)

    monkeypatch.setattr(checkpoint_lineage, "choose_checkpoint", choose)


def _line_from_the_newest_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint_lineage.line_from_memory

    def line(starts: Iterable[Start], run: str, round_: int, step: int) -> tuple[CheckpointId, ...]:
        newest = next(iter(starts), None)
        return () if newest is None else real([newest], newest.run, newest.round, step)

    monkeypatch.setattr(checkpoint_lineage, "line_from_memory", line)


def _failures_are_ignored_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint_lineage.choose_checkpoint
    monkeypatch.setattr(checkpoint_lineage, "choose_checkpoint", lambda newest, present, below: real(newest, present))


def _newest_checkpoints_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def deletable(newest: Start, present: Collection[CheckpointId], keep: int) -> list[CheckpointId]:
        return sorted(each for each in present if newest.has(each))[keep:]

    monkeypatch.setattr(checkpoint_lineage, "deletable", deletable)


@pytest.mark.parametrize(
    ("mistake", "promise"),
    [
        (_any_line, "off the line"),
        (_line_without_steps, "off the line|overwritten"),
        (_no_line, "lost"),
        (_line_that_forgets_nothing, "off the line"),
        (_failures_are_ignored, "repeated"),
        (_differing_copies, "mixed|lost"),
        (_nothing_is_cleared, "overwritten"),
        (_nothing_is_fetched, "torn"),
        (_newest_is_overwritten, "overwritten"),
        (_one_slot, "overwritten"),
        (_old_commit_stays_while_written, "torn|mixed|off the line"),
        (_committed_before_written, "torn|mixed"),
        (_any_checkpoint, "off the line on disk"),
        (_checkpoints_without_steps, "off the line on disk"),
        (_only_own_checkpoints, "lost on disk"),
        (_largest_step, "off the line on disk"),
        (_line_from_the_newest_start, "on disk"),
        (_failures_are_ignored_on_disk, "repeated on disk"),
        (_newest_checkpoints_are_deleted, "lost on disk"),
    ],
)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(ViolationError, match=promise):
        play_all()
