"""Fixtures of the GPU layer, which needs a GPU: without one it fails as a whole, with one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import NO_GPU, Gpu, gpus
from tests.gpu.machine import devices as usable_devices
from tests.gpu.running import Training
from tests.local.agents import allocation
from tests.local.conftest import _temporary_files  # noqa: F401

REPORT = Path(os.environ.get("OUT", "build")) / "gpu.json"
"""What was measured, for docs/gpu.md."""


def pytest_sessionstart(session: pytest.Session) -> None:
    found, reason = gpus()
    if not found:
        raise pytest.UsageError(NO_GPU.format(reason=reason))


@pytest.fixture(scope="session")
def machine() -> tuple[Gpu, ...]:
    """The GPUs of this machine."""
    return gpus()[0]


@pytest.fixture(scope="session")
def devices(machine: tuple[Gpu, ...]) -> tuple[str, ...]:
    """UUIDs of all that one process can use together."""
    return usable_devices(machine)


@pytest.fixture(scope="session")
def report(machine: tuple[Gpu, ...]) -> Iterator[dict[str, object]]:
    """What tests measured; written to a file and printed."""
    import torch

    found: dict[str, object] = {"gpus": [gpu.name for gpu in machine], "torch": torch.__version__}
    yield found
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{REPORT}: {json.dumps(found)}")


@pytest.fixture
def train(tmp_path: Path, machine: tuple[Gpu, ...], devices: tuple[str, ...]) -> Iterator[Callable[..., Training]]:
    """Starts a training; see `Training`."""
    variables = {}
    # By default CUDA counts the fastest first, and sees all.
    if len(devices) != len(machine) or len({gpu.name for gpu in machine}) > 1 or "CUDA_VISIBLE_DEVICES" in os.environ:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with allocation(tmp_path, 1) as made:
        yield lambda *words, **options: Training(made, *words, **{**variables, **options})
