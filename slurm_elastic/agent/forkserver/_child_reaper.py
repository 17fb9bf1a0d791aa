"""The workers of a round as children of the fork server, and the processes that they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from slurm_elastic.agent.forkserver._linux import children

__all__ = ["ChildReaper"]

_BETWEEN_SCANS = 1.0
"""Seconds between two looks through /proc for zombies of descendants that lost their parent."""


class ChildReaper:
    """All descendants of this process.

    A worker that ended stays a zombie until its round is swept: so its pid, which is also the id of its process group,
    belongs to nobody else, and what it left in that group can be signalled without doubt.
    """

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.replacements: set[int] = set()
        """Children that were forked to take this process's place: not killed with what workers leave."""
        self._ended: set[int] = set()
        self._unreported: list[tuple[int, int]] = []
        self._bell, self._ring = -1, -1
        self._previous_handler: Any = None
        self._next_scan = 0.0
        self._owes_scan = False

    def watch(self) -> None:
        """Begin to notice children that end."""
        self._bell, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_handler = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def forget(self) -> None:
        """In a forked child: undo `watch`."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._previous_handler)
        os.close(self._bell)
        os.close(self._ring)

    def fileno(self) -> int:
        """Readable after a child has ended."""
        return self._bell

    def wait(self, seconds: float) -> None:
        """Until a child ends, at most this long; the next call of `exits` finds which."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._drain():
            time.sleep(0.002)

    def add(self, pid: int) -> None:
        """Count this child as a worker."""
        self.workers.add(pid)

    def exits(self) -> Iterator[tuple[int, int]]:
        """Workers that ended and were not given before: pid, and exit code or minus the signal's number."""
        self._drain()
        found = bool(self._unreported)
        yield from self._unreported
        self._unreported.clear()
        for pid in sorted(self.workers - self._ended):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                found = True
                self._ended.add(pid)
                yield pid, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        if not found:
            self._owes_scan = True
        if self.seconds_to_scan() == 0:
            self._owes_scan = False
            self._next_scan = time.monotonic() + _BETWEEN_SCANS
            self._reap_adopted()

    def seconds_to_scan(self) -> float | None:
        """When `exits` has to be called again although no child ended; None if it need not."""
        return max(0.0, self._next_scan - time.monotonic()) if self._owes_scan else None

    def signal(self, number: int) -> None:
        """Signal the process groups of all workers."""
        for pid in self.workers:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                # Forked, but not yet the leader of its group.
                os.kill(pid, number)
            except PermissionError:
                continue

    def kill(self) -> None:
        """Kill the process groups of all workers."""
        self.signal(signal.SIGKILL)

    def kill_rest(self, spared: Collection[int] = ()) -> list[int]:
        """Reap what is dead, kill every child that is not; returns the living.

        Only children are killed, whose pids nobody else can get before this process reaps them. Their own children
        become ours when they die (PR_SET_CHILD_SUBREAPER), and are met in the next call.

        Args:
            spared: those that are not killed, besides `replacements`.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.workers - self._ended:
                    self._unreported.append((pid, os.waitstatus_to_exitcode(status)))
                self._forget_child(pid)
            living = [pid for pid in children(os.getpid()) if pid not in self.replacements and pid not in spared]
            for pid in living:
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return living
        return []

    def sweep(self, seconds: float, meanwhile: Callable[[], None], spared: Collection[int] = ()) -> list[int]:
        """Kill every descendant.

        Args:
            seconds: how long that may take.
            meanwhile: called again and again until it is done.
            spared: see `kill_rest`.

        Returns:
            Those that the kernel would not end in time (uninterruptible sleep).
        """
        self.kill()
        end = time.monotonic() + seconds
        while True:
            left = self.kill_rest(spared)
            meanwhile()
            if not left or time.monotonic() > end:
                return left
            self.wait(0.02)

    def _reap_adopted(self) -> None:
        for pid in children(os.getpid()):
            if pid not in self.workers:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        self._forget_child(pid)

    def _forget_child(self, pid: int) -> None:
        self.workers.discard(pid)
        self._ended.discard(pid)
        self.replacements.discard(pid)

    def _drain(self) -> bool:
        try:
            return bool(os.read(self._bell, 4096))
        except BlockingIOError:
            return False
