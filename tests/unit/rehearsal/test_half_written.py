"""Checkpoints that have their names before they are complete, and what a kill leaves of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slurm_elastic.rehearsal.files import NewNames, entries, leave_half, newest_in_place


@pytest.fixture
def names(tmp_path: Path) -> Iterator[NewNames]:
    with closing(NewNames(tmp_path)) as names:
        yield names


def test_a_name_that_was_given_by_renaming_is_not_in_place(names: NewNames, tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"tmp.{step}").touch()
        (tmp_path / f"tmp.{step}").rename(tmp_path / f"model-{step:05d}.pt")
        names.read()
        (tmp_path / f"step_{step}" / f"rank_{step}").touch()
    names.read()
    assert names.in_place == {("step_", ""), ("tmp.", ""), ("rank_", "")}


def test_directories_are_watched_under_their_new_names(names: NewNames, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    names.read()
    (tmp_path / "new").rename(tmp_path / "out")
    (tmp_path / "out/sub").mkdir()
    names.read()
    (tmp_path / "out/sub/step_7").touch()
    names.read()
    assert names.in_place == {("step_", "")}


def test_nothing_is_known_once_it_is_closed(names: NewNames, tmp_path: Path) -> None:
    (tmp_path / "step_1").touch()
    names.read()
    names.close()
    assert names.in_place == set()


STEP = ("step_", "")


@pytest.mark.parametrize(
    ("paths", "in_place", "expected"),
    [
        (["step_10", "step_20", "step_20/rank_0", "step_20/step_20"], {STEP, ("rank_", "")}, "step_20"),
        (["out/step_0020"], {STEP}, "out/step_0020"),
        (["step_20"], set(), None),
        # A round has the number of a checkpoint, but there are others.
        (["step_10", "rounds/20", "rounds/1"], {STEP, ("", "")}, "step_10"),
        (["epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt"], {("epoch=1-step=", ".ckpt")}, "epoch=1-step=20.ckpt"),
    ],
)
def test_the_newest_checkpoint_is_found(paths: list[str], in_place: set[tuple[str, str]], expected: str | None) -> None:
    found = newest_in_place(map(Path, paths), {10, 20}, in_place)
    assert (None if found is None else str(found.path)) == expected


def test_another_step_has_as_many_digits() -> None:
    found = newest_in_place([Path("a/step_00020.pt")], {20}, {("step_", ".pt")})
    assert found is not None
    assert found.of_step(26) == Path("a/step_00026.pt")


def test_half_of_a_directory_is_its_older_files_and_the_last_one_is_cut(tmp_path: Path) -> None:
    whole = tmp_path / "step_20"
    (whole / "sub").mkdir(parents=True)
    for age, name in ((3, "first"), (2, "sub/second"), (1, "third")):
        (whole / name).write_text("0123456789")
        os.utime(whole / name, (1e9 - age, 1e9 - age))
    leave_half(whole, tmp_path / "step_26")
    half = {str(path.relative_to(tmp_path)) for path in entries([tmp_path]) if path.is_file()}
    assert {name for name in half if name.startswith("step_26")} == {"step_26/first", "step_26/sub/second"}
    assert (tmp_path / "step_26/first").read_text() == "0123456789"
    assert (tmp_path / "step_26/sub/second").read_text() == "01234"


def test_half_of_a_file_and_of_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("0123456789")
    leave_half(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "01234"
    (tmp_path / "c").mkdir()
    leave_half(tmp_path / "c", tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []
