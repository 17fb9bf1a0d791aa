"""NVIDIA's GPUs, of which neither the agent nor the fork server opens one.

A process that has used CUDA cannot be forked, and one that has a device open keeps it from being reset. torch opens
them by itself: LaunchConfig asks whether there are GPUs (torch/distributed/launcher/api.py, 2.13), and so do many
modules at their import.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from slurm_elastic.environment import changed_environment
from slurm_elastic.ownership import unpickle

_T = TypeVar("_T")
_ASK_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable torch asks NVML, a library of the driver, for devices, and not CUDA, which works in no process
forked after its first use (torch/cuda/__init__.py, 2.13)."""
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""The device of unified memory, which CUDA opens at its initialization."""


def asked_apart(question: Callable[[], _T]) -> _T:
    """Return what a function returns that may open devices: a process forked for it calls it, and ends.

    Raises:
        Exception: What the function has raised.
        RuntimeError: The process has ended before it had an answer.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                result: tuple[Exception | None, _T | None] = None, question()
            except Exception as failure:
                result = failure, None
            content = pickle.dumps(result)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(content)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    told: tuple[Exception | None, _T] | None = None
    with contextlib.suppress(EOFError):
        told = unpickle(reader)
    _pid, status = os.waitpid(pid, 0)
    if told is None:
        raise RuntimeError(f"the process that asks for devices has ended with {os.waitstatus_to_exitcode(status)}")
    error, answer = told
    if error is not None:
        raise error
    return answer


def cuda_is_open() -> bool:
    """Return True if this process has initialized CUDA, also where torch was only asked whether there is a GPU."""
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_CUDA_DEVICE):  # noqa: PTH115
                return True
    return False


@contextlib.contextmanager
def no_devices() -> Iterator[None]:
    """Have torch find no GPU meanwhile: it asks neither CUDA nor the driver then."""
    with changed_environment({_ASK_DRIVER: "1", "CUDA_VISIBLE_DEVICES": ""}):
        yield


@contextlib.contextmanager
def devices_counted() -> Iterator[None]:
    """Have torch answer meanwhile from the number of devices that a process of its own has found, and ask nobody.

    NVML, asked here, would leave a thread behind, without which no forked process is as a fresh one (driver 580).
    """
    cuda: Any = sys.modules["torch.cuda"]
    with changed_environment({_ASK_DRIVER: "1"}):
        # Kept by torch where it has counted (torch/cuda/__init__.py, device_count, 2.11 to 2.15).
        cuda._cached_device_count = _device_count()
        try:
            yield
        finally:
            # Workers may be given other devices than this process sees.
            cuda._cached_device_count = None


@functools.cache
def _device_count() -> int:
    import torch

    # A CPU build has none, without asking.
    return asked_apart(torch.cuda.device_count) if torch.version.cuda or torch.version.hip else 0
