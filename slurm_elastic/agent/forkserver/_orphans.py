"""Kills the processes of a killed fork server, whose parent the agent becomes (PR_SET_CHILD_SUBREAPER)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from slurm_elastic.agent.forkserver._linux import children, session_of

_MARKS = ("SLURM_ELASTIC_WARM", "SLURM_ELASTIC_ROUND")
"""Variables that a process has only if it was forked from the fork server, or executed by a worker."""


def kill_orphans(sessions: Collection[int], timeout: float, spared: Collection[int] = ()) -> dict[int, int]:
    """Kill and reap the children of this process that belong to workers, and what they leave behind in turn.

    Args:
        sessions: The ids of the workers' sessions.
        timeout: Seconds after which processes are left that do not end (uninterruptible sleep).
        spared: The pids of processes that are no workers'.

    Returns:
        The exit codes, or minus signal numbers, of the reaped processes by pid.
    """
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout

    def is_orphan(pid: int) -> bool:
        return pid not in spared and (session_of(pid) in sessions or _is_marked(pid))

    while left := [pid for pid in children(os.getpid()) if is_orphan(pid)]:
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
    """Return whether a process was started with the environment of a worker; a session of its own does not hide that.

    The agent's other children (scontrol, py-spy) were not. If the agent itself runs in a worker, they were, too; then
    only sessions count.
    """
    if any(name in os.environ for name in _MARKS):
        return False
    try:
        # The environment that it, or the process that it was forked from, was executed with (proc_pid_environ(5)).
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(os.fsdecode(entry.partition(b"=")[0]) in _MARKS for entry in environment.split(b"\0"))
