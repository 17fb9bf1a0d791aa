"""The processes of a killed fork server, which the agent inherits (PR_SET_CHILD_SUBREAPER)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from slurm_elastic.agent.forkserver._linux import children, session_of

__all__ = ["kill_orphans"]

_MARKS = ("SLURM_ELASTIC_WARM", "SLURM_ELASTIC_ROUND")
"""Variables that a process has only if it was forked from the fork server, or executed by a worker."""


def kill_orphans(sessions: Collection[int], timeout: float) -> dict[int, int]:
    """Kill and reap the children of this process that belong to workers, and what they leave behind in turn.

    Args:
        sessions: those that the workers lead.
        timeout: seconds after which those are left that will not end (uninterruptible sleep).

    Returns:
        Their exit codes, or minus signal numbers, by pid.
    """
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout
    while left := [pid for pid in children(os.getpid()) if session_of(pid) in sessions or _is_marked(pid)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    return codes


def _is_marked(pid: int) -> bool:
    """Return whether this process has the environment of a worker, as even one has that took an own session.

    The agent's own children, which ask Slurm or show stacks, have not. When the agent runs in a worker itself, they
    have; then only sessions count.
    """
    if any(name in os.environ for name in _MARKS):
        return False
    try:
        # The environment that it, or the process that it was forked from, was executed with (proc_pid_environ(5)).
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(os.fsdecode(entry.partition(b"=")[0]) in _MARKS for entry in environment.split(b"\0"))
