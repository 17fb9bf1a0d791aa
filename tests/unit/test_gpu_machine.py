"""What the GPU layer knows about the machine, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.machine import NO_GPU, descendants, devices, devices_of, gpus_in, visible

CHECKOUT = Path(__file__).parents[2]

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-2222-3333-4444-555555555555)
  MIG 1g.18gb     Device  0: (UUID: MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee)
  MIG 1g.18gb     Device  1: (UUID: MIG-aaaaaaaa-bbbb-cccc-dddd-ffffffffffff)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-66666666-2222-3333-4444-555555555555)
"""


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, ["MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"]),
        ("1", ["GPU-66666666-2222-3333-4444-555555555555"]),
        ("GPU-6666", ["GPU-66666666-2222-3333-4444-555555555555"]),
        ("MIG-aaaaaaaa-bbbb-cccc-dddd-ffffffffffff", ["MIG-aaaaaaaa-bbbb-cccc-dddd-ffffffffffff"]),
        ("", []),
    ],
)
def test_a_job_uses_no_others_than_its_own(variable: str | None, names: list[str]) -> None:
    assert [*devices(visible(gpus_in(LISTING), variable))] == names


def test_open_devices_and_descendants() -> None:
    with (
        subprocess.Popen(["sh", "-c", "sleep 60 & wait"], stdin=subprocess.DEVNULL, start_new_session=True) as process,
        Path(os.devnull).open("rb"),
    ):
        try:
            assert {process.pid} < descendants(os.getpid())
            assert process.pid in descendants(process.pid)
            assert devices_of(process.pid) == []
            assert devices_of(process.pid, prefix="/dev/nu") == ["/dev/null"]
            # A file that is mapped counts, too.
            assert devices_of(os.getpid(), prefix=os.path.realpath(sys.executable)) != []
        finally:
            os.killpg(process.pid, 9)


def test_without_a_gpu_the_layer_fails_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=CHECKOUT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    line = NO_GPU.format(reason="nvidia-smi is missing")
    assert [said for said in (done.stdout + done.stderr).splitlines() if said] == [f"ERROR: {line}"]
