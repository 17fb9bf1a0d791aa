"""The training script and the harness of the GPU layer, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu.running import AGENT, TORCHRUN, Training
from tests.gpu.worker import RESTARTS
from tests.local.agents import allocation


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    with ExitStack() as stack:
        made = stack.enter_context(allocation(tmp_path, 1))
        yield lambda *words, **options: Training(made, *words, device="cpu", **options)


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


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [AGENT, TORCHRUN])
def test_times_of_restarts(train: Callable[..., Training], launcher: Sequence[str]) -> None:
    training = train("restart", 1, f"--max-restarts={RESTARTS}", launcher=launcher)
    restarts = training.restarts()
    assert restarts["whole"] >= restarts["until the script has torch"] + restarts["process group"] > 0
    training.finish()


@pytest.mark.nightly
def test_the_cost_of_a_snapshot(train: Callable[..., Training]) -> None:
    training = train("cost", 1)
    (seen,) = training.seen()
    assert min(seen["cost"]["snapshots"]) > 0
    training.finish()
