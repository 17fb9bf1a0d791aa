"""Fixtures of the GPU layer, which needs a GPU: without one it fails as a whole, with one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import NO_GPU, Gpu, gpus
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
def report(machine: tuple[Gpu, ...]) -> Iterator[dict[str, object]]:
    """What tests measured; written to a file and printed."""
    import torch

    found: dict[str, object] = {"gpus": [gpu.name for gpu in machine], "torch": torch.__version__}
    yield found
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{REPORT}: {json.dumps(found)}")


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts a training; see `Training`."""
    with allocation(tmp_path, 1) as made:
        yield lambda *words, **options: Training(made, *words, **options)
