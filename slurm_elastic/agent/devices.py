"""NVIDIA's GPUs, of which neither the agent nor the fork server opens one.

A process that has used CUDA cannot be forked, and one that has a device open keeps it from being reset. torch opens
them by itself: LaunchConfig asks whether there are GPUs (torch/distributed/launcher/api.py, 2.13), and so do many
modules at their import.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from slurm_elastic.environment import changed_environment
from slurm_elastic.unpickling import unpickle

_T = TypeVar("_T")
_ASK_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable torch asks NVML, a library of the driver, for devices, and not CUDA, which works in no process
forked after its first use (torch/cuda/__init__.py, 2.13)."""
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""The device of unified memory, which CUDA opens at its initialization and NVML never does (driver 580)."""
_NVML = "libnvidia-ml.so.1"
_UNINITIALIZED = 1
"""NVML_ERROR_UNINITIALIZED (NVML API reference, nvmlReturn_t)."""


def asked_apart(question: Callable[[], _T]) -> _T:
    """Return what a function returns that may open devices: a process forked for it calls it, and ends.

    Raises:
        Exception: What the function has raised.
        RuntimeError: The process has ended before it had an answer.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(_answer(question)))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    answer = None
    try:
        answer = unpickle(reader)
    except EOFError:
        pass
    finally:
        _pid, status = os.waitpid(pid, 0)
    if answer is None:
        raise RuntimeError(f"the process that asks for devices has ended with {os.waitstatus_to_exitcode(status)}")
    error, found = answer
    if error is not None:
        raise error
    result: _T = found
    return result


def _answer(question: Callable[[], _T]) -> tuple[Exception | None, _T | None]:
    try:
        return None, question()
    except Exception as error:
        return error, None


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
def driver_asked() -> Iterator[None]:
    """Have torch ask the driver for devices meanwhile, not CUDA, and close afterwards what the driver has opened."""
    with changed_environment({_ASK_DRIVER: "1"}):
        try:
            yield
        finally:
            _close_driver()


def _close_driver() -> None:
    """End each use of NVML that torch has begun, and does not end (_raw_device_count_nvml in torch/cuda, 2.13).

    NVML counts its uses; to end one too many is no error (NVML API reference, nvmlShutdown).
    """
    # What a library has begun by pynvml, it goes on to use.
    if getattr(sys.modules.get("pynvml"), "_nvmlLib_refcount", 0):
        return
    # The process has it loaded, if torch has asked; imported late, as a fork server without torch needs none.
    import ctypes

    try:
        library = ctypes.CDLL(_NVML, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return
    count = ctypes.c_int()
    while library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _UNINITIALIZED:
        if library.nvmlShutdown() != 0:
            return
