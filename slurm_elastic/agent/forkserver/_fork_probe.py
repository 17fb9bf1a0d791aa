"""Tries in two forked processes whether workers forked from this process can compute and communicate."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from slurm_elastic.agent.forkserver._linux import set_parent_death_signal
from slurm_elastic.agent.forkserver._memfd import memory_file
from slurm_elastic.agent.forkserver._preload import torch_says

_PROCESSES = 2
_BAD_FORK = 3


def probe_forks(timeout: float) -> str | None:
    """Fork processes that compute in parallel and all-reduce a tensor; return the problem, None if there is none.

    Args:
        timeout: Seconds after which the processes are killed.
    """
    meeting = memory_file()
    pids = [_fork(rank, f"/proc/{os.getpid()}/fd/{meeting}", timeout) for rank in range(_PROCESSES)]
    end, trouble = time.monotonic() + timeout, None
    while pids:
        for pid in [*pids]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                trouble = trouble or (None if code == 0 else _described(code))
        if pids and (trouble is not None or time.monotonic() > end):
            trouble = trouble or f"a forked process hangs: it has not reduced a tensor within {timeout:.0f} s"
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    os.close(meeting)
    return trouble


def _fork(rank: int, meeting: str, timeout: float) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            set_parent_death_signal(signal.SIGKILL)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            if torch_says("_is_in_bad_fork"):
                os._exit(_BAD_FORK)
            os._exit(0 if _works(rank, meeting, timeout) else 1)
        except BaseException:
            os._exit(1)
    return pid


def _works(rank: int, meeting: str, timeout: float) -> bool:
    torch: Any = sys.modules["torch"]
    torch.set_num_threads(2)
    square = torch.ones(300, 300)
    if float((square @ square).sum()) != 300.0**3 or float(torch.ones(1 << 17).sum()) != float(1 << 17):
        return False
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        if float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()) != 300.0**3:
            return False
    distributed: Any = sys.modules["torch.distributed"]
    if not distributed.is_gloo_available():
        return True
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(meeting, _PROCESSES)
    group = distributed.ProcessGroupGloo(store, rank, _PROCESSES, timedelta(seconds=timeout))
    tensor = torch.ones(8)
    group.allreduce([tensor]).wait()
    return bool((tensor == _PROCESSES).all())


def _described(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"a forked process ends with {signal.Signals(-code).name}"
    if code == _BAD_FORK:
        # torch marks a child in which CUDA cannot be used any more, also where CUDA was only asked for its devices
        # (torch/csrc/cuda/Module.cpp, poison_fork, 2.13).
        return "CUDA was used, and cannot be used after a fork"
    return "a forked process cannot compute or reduce a tensor"
