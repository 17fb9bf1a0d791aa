"""The agent's handle of a process that its fork server has forked to take its place."""

from __future__ import annotations

import os
import select
import signal
import subprocess

from slurm_elastic.agent.forkserver._channel import Channel

__all__ = ["FormerServers", "Replacement"]


class Replacement:
    """A child of the fork server, and of this process once that has ended; to be waited for like a Popen."""

    def __init__(self, pid: int, channel: int, handle: int) -> None:
        self.pid = pid
        self.channel = Channel.inherited(channel)
        self._handle = handle
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus a signal's number.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        if self._code is None:
            waiting = select.poll()
            waiting.register(self._handle, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("replacement of the fork server", timeout or 0.0)
            os.close(self._handle)
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                # The fork server was still its parent, and took the code.
                self._code = -signal.SIGKILL
        return self._code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._code is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class FormerServers:
    """Fork servers that were told to end, and have to be waited for."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes] | Replacement] = []

    def add(self, process: subprocess.Popen[bytes] | Replacement) -> None:
        """Wait for this one, too, and before the others."""
        self._processes.insert(0, process)

    def reap(self, seconds: float) -> None:
        """Wait for each of them, at most so many seconds; then kill it."""
        for process in self._processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
