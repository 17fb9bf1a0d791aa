"""The children of the fork server: workers of a round, processes for the agent, and what both leave behind."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slurm_elastic.agent.forkserver._linux import children, set_title

_SCAN_INTERVAL = 1.0
"""Seconds between two scans of /proc for zombies of descendants whose own parent has ended."""


class ChildReaper:
    """The workers among the children of this process, and every other descendant that a worker leaves behind.

    A worker that has ended stays a zombie until `sweep`: so the kernel gives its pid, which is also the id of its
    process group, to no other process, and a signal to that group reaches only what the worker has left.
    """

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.kept: set[int] = set()
        """Children that `sweep` does not kill: fork servers that replace this one, and children for the agent."""
        self._ended: set[int] = set()
        self._unreported: list[tuple[int, int]] = []
        self._wakeup_reader, self._wakeup_writer = -1, -1
        self._previous_handler: Any = None
        self._next_scan = 0.0
        self._scan_pending = False

    def watch(self) -> None:
        """Make `fileno` readable whenever a child ends (SIGCHLD)."""
        self._wakeup_reader, self._wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_handler = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def forget(self) -> None:
        """In a forked child: undo `watch`."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._previous_handler)
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)

    def fileno(self) -> int:
        """Readable after a child has ended."""
        return self._wakeup_reader

    def wait(self, seconds: float) -> None:
        """Wait until a child ends, at most this many seconds; the next call of `exits` says which."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._clear_wakeup():
            time.sleep(0.002)

    def exits(self) -> Iterator[tuple[int, int]]:
        """Yield each worker that has ended once: its pid, and its exit code or minus the signal's number."""
        self._clear_wakeup()
        has_exits = bool(self._unreported)
        yield from self._unreported
        self._unreported.clear()
        for pid in sorted(self.workers - self._ended):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                has_exits = True
                self._ended.add(pid)
                yield pid, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        if not has_exits:
            self._scan_pending = True
        if self.seconds_to_scan() == 0:
            self._scan_pending = False
            self._next_scan = time.monotonic() + _SCAN_INTERVAL
            self._reap_orphans()

    def seconds_to_scan(self) -> float | None:
        """Return the seconds until `exits` has to be called although no child has ended; None if it need not."""
        return max(0.0, self._next_scan - time.monotonic()) if self._scan_pending else None

    def kill(self) -> None:
        """Kill the process groups of all workers."""
        for pid in self.workers:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                # Forked, but setsid has not made it the leader of its group yet.
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                continue

    def kill_children(self) -> list[int]:
        """Reap the children that have ended, kill the others, and return the pids of those that still lived.

        Only children are killed: the kernel gives a child's pid to no other process before this process reaps it. When
        a child ends its own children become children of this process (PR_SET_CHILD_SUBREAPER); the next call kills
        them.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.workers - self._ended:
                    self._unreported.append((pid, os.waitstatus_to_exitcode(status)))
                self._forget_child(pid)
            living = [pid for pid in children(os.getpid()) if pid not in self.kept]
            for pid in living:
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return living
        return []

    def sweep(self, seconds: float, between: Callable[[], None]) -> list[int]:
        """Kill every descendant.

        Args:
            seconds: The longest time that this may take.
            between: Called after each look at the children, until all have ended.

        Returns:
            The pids of those that have not ended in time (uninterruptible sleep).
        """
        self.kill()
        end = time.monotonic() + seconds
        while True:
            left = self.kill_children()
            between()
            if not left or time.monotonic() > end:
                return left
            self.wait(0.02)

    def _reap_orphans(self) -> None:
        for pid in children(os.getpid()):
            if pid not in self.workers:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        self._forget_child(pid)

    def _forget_child(self, pid: int) -> None:
        self.workers.discard(pid)
        self._ended.discard(pid)
        self.kept.discard(pid)

    def _clear_wakeup(self) -> bool:
        try:
            return bool(os.read(self._wakeup_reader, 4096))
        except BlockingIOError:
            return False


_PACKAGE_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # noqa: PTH100, PTH118, PTH120


def run_agent_child(module: str, descriptor: int, signal_mask: Sequence[int]) -> None:
    """Send the agent a handle of this process, call ``main(descriptor)`` of a module, and end this process.

    Args:
        module: Of this package; its main function begins with the signals that Slurm sends to jobs blocked.
        descriptor: The socket to the agent. Its first message is the process id, with a pidfd.
        signal_mask: The signals that are blocked in the agent besides.
    """
    code = 1
    try:
        os.setsid()
        handle = os.pidfd_open(os.getpid())
        agent = socket.socket(fileno=descriptor)
        socket.send_fds(agent, [str(os.getpid()).encode()], [handle])
        agent.detach()
        os.close(handle)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        os.close(nothing)
        blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
        signal.pthread_sigmask(signal.SIG_SETMASK, {*signal_mask, *blocked})
        # The fork server has forgotten this package, and a script's directory may have modules of the same names.
        sys.path[:] = [_PACKAGE_ROOT, *filter(None, sys.path)]
        set_title(f"slurm-elastic {module.rpartition('.')[2]}", "SLURM_ELASTIC_WARM")
        importlib.import_module(module).main(descriptor)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Python would go on to run the script.
        os._exit(code)
