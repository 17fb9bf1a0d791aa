"""The training example as a user runs it: under plain python and torchrun."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slurm_elastic.rundir import RunDir

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
HANG_GUARD = 240.0  # seconds
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the example with so many processes (None: plain python) in tmp_path."""
    started: list[subprocess.Popen[str]] = []
    prefixes = ("SLURM", "PET_", "TORCHELASTIC_", "OMP_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}

    def start(processes: int | None, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        launcher = [sys.executable]
        if processes is not None:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        process = subprocess.Popen(
            [*launcher, str(EXAMPLES / "digits.py"), *map(str, arguments)],
            cwd=tmp_path,
            env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parents[1]), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=HANG_GUARD)


@pytest.fixture
def counting() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("count_samples_example", EXAMPLES / "count_samples.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def output(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=HANG_GUARD)
    assert process.returncode == 0, stderr
    return stdout


def losses(stdout: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch .* loss ([\d.]+),", stdout, flags=re.MULTILINE)]


def saved(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True)


def test_plain_python_learns_the_digits(start, tmp_path):
    stdout = output(start(None))
    assert stdout.startswith("fresh start with world size 1\n")
    assert len(losses(stdout)) == 10
    accuracy = float(re.search(r"finished after 450 steps: test accuracy ([\d.]+)%\n$", stdout)[1])
    assert accuracy > 95
    assert saved(tmp_path / "digits-checkpoints" / "checkpoint.pt")["step"] == 450


@pytest.mark.nightly
def test_two_processes_train_as_one_does_although_the_last_batch_is_uneven(start, tmp_path):
    # 1437 = 4 * 359 + 1: two processes get 180 and 179 samples in each step, 1 and 0 in the last of an epoch.
    outputs, checkpoints = [], []
    for processes in (None, 2):
        directory = tmp_path / f"processes-{processes}"
        arguments = ("--epochs", 2, "--batch-size", 359, "--checkpoint-dir", directory)
        outputs.append(output(start(processes, *arguments)))
        checkpoints.append(saved(directory / "checkpoint.pt"))
    assert [checkpoint["step"] for checkpoint in checkpoints] == [10, 10]
    assert losses(outputs[1]) == pytest.approx(losses(outputs[0]), abs=2e-4)
    torch.testing.assert_close(checkpoints[1]["model"], checkpoints[0]["model"], rtol=1e-4, atol=1e-5)


def test_a_group_that_was_followed_leaves_the_checkpoint_that_is_there(start, tmp_path):
    run_dir = RunDir.for_run(tmp_path, "7").open()
    for epoch in (1, 2):
        run_dir.claim_record({}, "epochs", "7.0", epoch)
    own = {"RUN_ID": "7", "RUN_DIR": str(run_dir.path), "ROUND": "0", "SCOPE": "7.0", "EPOCH": "1"}
    process = start(None, "--epochs", 1, **{f"SLURM_ELASTIC_{name}": value for name, value in own.items()})
    stderr = process.communicate(timeout=HANG_GUARD)[1]
    assert process.returncode == 1
    assert stderr.endswith("RuntimeError: another group of workers has taken over this run; its checkpoint stays\n")
    assert not (tmp_path / "digits-checkpoints" / "checkpoint.pt").exists()


def test_the_count_sees_what_is_missing_repeated_or_of_an_abandoned_start(counting, tmp_path):
    checkpoint, records = tmp_path / "checkpoint.pt", tmp_path / "digits"
    torch.save({"step": 3, "sampler": {"epoch": 1, "consumed": 1}}, checkpoint)

    def started(number: int, resumed_at: int) -> dict[str, int]:
        return {"start": number, "resumed_at": resumed_at, "world_size": 2, "dataset_size": 4}

    def stepped(number: int, epoch: int, step: int, *samples: int) -> dict[str, Any]:
        return {"start": number, "epoch": epoch, "step": step, "samples": samples}

    def counted(rank0: list[dict[str, Any]], rank1: list[dict[str, Any]]) -> list[tuple[int, int, bool]]:
        for rank, lines in enumerate((rank0, rank1)):
            Path(f"{records}.rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"start": 7, "sam')
        return [(each.once, each.repeated, each.right) for each in counting.count_samples(records, checkpoint)]

    # Start 10 got to step 2 but was checkpointed at step 1, start 20 took steps 2 and 3 and, uncheckpointed, 4.
    rank0 = [started(10, 0), stepped(10, 0, 1, 3), stepped(10, 0, 2, 0), started(20, 1), stepped(20, 0, 2, 0, 1)]
    rank0 += [stepped(20, 1, 3, 2), stepped(20, 1, 4, 0)]
    rank1 = [started(10, 0), stepped(10, 0, 1, 2), stepped(10, 0, 2, 1)]
    assert counted(rank0, rank1) == [(4, 0, True), (1, 0, True)]
    assert counted(rank0, rank1[:1]) == [(3, 0, False), (1, 0, True)]
    assert counted(rank0, [*rank1, stepped(20, 0, 2, 1)]) == [(3, 1, False), (1, 0, True)]
    with pytest.raises(ValueError, match="no records at"):
        counting.count_samples(tmp_path / "other", checkpoint)
