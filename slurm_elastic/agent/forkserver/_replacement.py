"""The agent's handles of processes that a fork server has forked for it, and of fork servers that have to end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess

from slurm_elastic.agent.forkserver._channel import Channel


class ForkedProcess:
    """A process that a fork server has forked; like a Popen, though its parent may be the fork server.

    Args:
        pid: Of the process.
        handle: A pidfd of it, which this object closes when the process has ended.
    """

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self._handle = handle
        self._code: int | None = None

    @property
    def is_waited_for(self) -> bool:
        """True if `wait` has returned: then its pid may be that of another process."""
        return self._code is not None

    def wait(self, timeout: float | None = None) -> int:
        """Wait at most `timeout` seconds and return the exit code, or minus a signal's number.

        Raises:
            subprocess.TimeoutExpired: The process has not ended.
        """
        if self._code is None:
            waiting = select.poll()
            waiting.register(self._handle, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("process of the fork server", timeout or 0.0)
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                # The fork server was still its parent, and has reaped it.
                self._code = -signal.SIGKILL
            os.close(self._handle)
        return self._code

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Replacement(ForkedProcess):
    """A forked fork server."""

    def __init__(self, pid: int, channel: int, handle: int) -> None:
        super().__init__(pid, handle)
        self.channel = Channel.inherited(channel)


class FormerServers:
    """Fork servers that were told to end and are not reaped yet."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes] | Replacement] = []

    def add(self, process: subprocess.Popen[bytes] | Replacement) -> None:
        """Add a process, to be waited for before the others."""
        self._processes.insert(0, process)

    def reap(self, seconds: float) -> None:
        """Wait up to `seconds` for each process, then kill it."""
        for process in self._processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
