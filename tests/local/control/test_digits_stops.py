"""The example under the trainer API: saved at the very step at which it was told to stop, and every sample once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from slurm_elastic.control import RoundControl
from tests.local.control.workers import ROOT

EXAMPLES = ROOT / "docs" / "examples"
HANG = 90.0  # seconds


def start(directory: Path, control: RoundControl, round_: int, size: int) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = ["--epochs", "1", "--step-time", "0.01", "--checkpoint-dir", str(directory / "checkpoints")]
    arguments += ["--checkpoint-every", "1000", "--record", str(directory / "records")]
    group = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / "digits.py"), *arguments],
            env={
                **os.environ,
                **group,
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "SLURM_ELASTIC_ROUND": str(round_),
                **control.environment(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def test_no_step_is_lost_and_every_sample_comes_once(tmp_path: Path) -> None:
    control = RoundControl(tmp_path / "pages", 0, 2)
    ranks = start(tmp_path, control, 0, 2)
    by = time.monotonic() + HANG
    while min(worker.boundary for worker in control.progress()) < 5:
        assert time.monotonic() < by, control.progress()
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.01)
    step = control.hold()
    assert step is not None
    control.stop_at(step, "preempted", 60.0)
    said = [rank.communicate(timeout=HANG)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0].endswith(f"saved step {step} and stops: preempted\n")
    assert control.stopped()
    assert [(worker.step, worker.checkpoint) for worker in control.progress()] == [(step, step), (step, None)]

    (rank,) = start(tmp_path, RoundControl(tmp_path / "pages", 1, 1), 1, 1)
    assert f"resumed at epoch 0 step {step} with world size 1, round 1\n" in rank.communicate(timeout=HANG)[0]
    count = [sys.executable, str(EXAMPLES / "count_samples.py"), str(tmp_path / "records"), *tmp_path.glob("*/*.pt")]
    counted = subprocess.run(count, capture_output=True, text=True)
    assert counted.stdout == "epoch 0: 1437 of 1437 samples once, exactly once\n", counted.stderr
