"""The soak finds losses that are not those of a training without mishaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.losses import wrong_losses


def write(directory: Path, rank: int, *losses: tuple[int, int]) -> None:
    directory.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses]
    (directory / f"losses.rank{rank}.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']))


@pytest.mark.parametrize(
    ("second_rank", "wrong"),
    [
        # A step that was taken again, and one that this rank did not take.
        (((1, 30), (2, 20), (2, 20)), []),
        (((2, 21),), ["step 2 had the loss [20, 21], without mishaps 20"]),
        (((4, 5),), ["the last step is 4, without mishaps 3", "step 4 had the loss [5], without mishaps None"]),
    ],
)
def test_each_loss_is_compared(tmp_path: Path, second_rank: tuple[tuple[int, int], ...], wrong: list[str]) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    write(undisturbed, 0, (1, 30), (2, 20), (3, 10))
    write(run, 0, (1, 30), (2, 20), (3, 10))
    write(run, 1, *second_rank)
    assert wrong_losses(run, undisturbed) == wrong


def test_a_step_that_is_missing_is_found(tmp_path: Path) -> None:
    write(tmp_path / "undisturbed", 0, (1, 30), (2, 20), (3, 10))
    write(tmp_path / "run", 0, (1, 30), (3, 10))
    assert wrong_losses(tmp_path / "run", tmp_path / "undisturbed") == ["step 2 of 3 was not taken"]
