"""The fork server's processes as the agent has them: their execution, handles of them, and how they end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm_elastic.agent.forkserver.linux import children, process_state
from slurm_elastic.agent.forkserver.protocol import Channel, wait_on
from slurm_elastic.agent.forkserver.worker_command import Program, boot_environment
from slurm_elastic.descriptors import given_limit


class ForkedProcess:
    """A process that a fork server has forked; like a Popen, though its parent may be the fork server.

    The handle, a pidfd, is closed when the process has ended.
    """

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self._handle = handle
        self.returncode: int | None = None
        """What `wait` has returned; None before. Afterwards the pid may be that of another process."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait and return the exit code, or minus a signal's number; raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not wait_on([self._handle], timeout):
                raise subprocess.TimeoutExpired("process of the fork server", timeout or 0.0)
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                # The fork server was still its parent, and has reaped it.
                self.returncode = -signal.SIGKILL
            os.close(self._handle)
        return self.returncode

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def spawn(
    program: Program, environment: Mapping[str, str], preload: Sequence[str], *, warm: bool, imports: str | None
) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start a fork server; return the agent's end of the channel to it, and the process. See `boot_environment`."""
    near_end, far_end = Channel.pair()
    # Slurm signals every process of a step. The fork server blocks all signals, since its end would end the workers,
    # which may still be saving; its workers get the mask that is in force here.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ends = {"agent": os.getpid(), "channel": far_end.fileno()}
    try:
        process = subprocess.Popen(
            program.command(),
            env=boot_environment(program, environment, preload, mask, warm=warm, imports=imports, **ends),
            pass_fds=[far_end.fileno()],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        far_end.close()
    with contextlib.suppress(ProcessLookupError):
        # An agent that starts a second fork server has raised its own limit on open files in the meantime.
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, given_limit())
    return near_end, process


_MARKS = ("SLURM_ELASTIC_WARM", "SLURM_ELASTIC_ROUND")
"""Variables that a process has only if it was forked from the fork server, or executed by a worker."""


def kill_orphans(sessions: Collection[int], timeout: float, spared: Collection[int]) -> None:
    """Kill and reap the children of this process that belong to these sessions of workers, and what they leave in turn.

    After `timeout` seconds processes are left that do not end (uninterruptible sleep); `spared` ones are no workers'.
    """
    end = time.monotonic() + timeout

    def is_orphan(pid: int) -> bool:
        state = process_state(pid)
        return pid not in spared and ((state is not None and state.session in sessions) or _is_marked(pid))

    while left := [pid for pid in children(os.getpid()) if is_orphan(pid)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > end:
            break
        time.sleep(0.005)


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
