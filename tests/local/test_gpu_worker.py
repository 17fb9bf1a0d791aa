"""The training script and the harness of the GPU layer, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu.running import Training
from tests.local.agents import allocation


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    with ExitStack() as stack:
        made = stack.enter_context(allocation(tmp_path, 1))
        yield lambda *words: Training(made, *words, device="cpu")


def test_a_group(train: Callable[..., Training]) -> None:
    training = train("group", 2)
    workers = training.seen()
    assert {record["sum"] for record in workers} == {3.0}
    assert {record["initialized"] for record in workers} == {False}
    assert training.others_with_devices(workers) == {}
    training.finish()


def test_a_hang_and_a_restart(train: Callable[..., Training]) -> None:
    training = train("hang", 1, "--max-restarts=1")
    (before,), (after,) = training.seen(), training.seen(1)
    assert after["pid"] != before["pid"]
    (stacks,) = training.allocation.run_dir.glob("logs/round_0000/*/rank_00/stacks.txt")
    assert f"process {before['pid']}," in stacks.read_text()
    training.finish()


def test_a_snapshot(train: Callable[..., Training]) -> None:
    training = train("snapshot", 1, "--max-restarts=1")
    (before,), (after,) = training.seen(), training.seen(1)
    assert (before["loaded"], after["loaded"]) == (0, 3)
    assert after["loaded weights"] == before["weights"] != before["loaded weights"]
    assert after["kinds"] == ["cpu"]
    training.finish()


def test_times_of_a_restart(train: Callable[..., Training]) -> None:
    training = train("restart", 1, "--max-restarts=1")
    (after,), (failed,) = training.seen(1), training.seen(0, "failed")
    assert failed["failed"] < after["begun"] <= after["imported"] <= after["context"] <= after["stepped"]
    training.finish()
