from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from slurm_elastic.agent.node import devices
from slurm_elastic.agent.node.devices import asked_apart, cuda_is_open, devices_counted, no_devices
from tests.unit.agent.helpers.command_lines import STEP, settle


def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have torch pretend to be built for CUDA, and note who asks it."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: asked.append("CUDA") or 1, raising=False)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: asked.append("driver") or 1)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"), raising=False)
    return asked


def test_another_process_answers() -> None:
    assert asked_apart(lambda: (os.getpid() != os.getppid(), os.getppid())) == (True, os.getpid())


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match=r"^no GPU$"):
        asked_apart(lambda: (_ for _ in ()).throw(ValueError("no GPU")))


def test_a_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"has ended with -9$"):
        asked_apart(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_an_answer_that_cannot_be_told_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"has ended with 1$"):
        asked_apart(lambda: lambda: 0)


def test_torch_finds_no_device_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _cuda_build(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with no_devices():
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
    assert asked == []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
    assert torch.cuda.is_available()
    assert asked == ["CUDA"]


def test_an_agent_has_its_settings_without_a_question_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = _cuda_build(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert settle("--nproc-per-node 1 train.py", STEP).launch_config.nproc_per_node == 1
    assert settle("--nproc-per-node gpu train.py", STEP).launch_config.nproc_per_node == 1
    assert asked == []


def test_torch_answers_with_a_number_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _cuda_build(monkeypatch)
    monkeypatch.setattr(devices, "_device_count", lambda: 3)
    with devices_counted():
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 3)
    assert asked == []
    # A worker counts again.
    assert torch.cuda.device_count() == 1
    assert asked == ["driver"]


def test_the_device_of_cuda_tells_that_it_is_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_CUDA_DEVICE", str(tmp_path / "uvm"))
    assert not cuda_is_open()
    with (tmp_path / "uvm").open("w"):
        assert cuda_is_open()
    assert not cuda_is_open()
