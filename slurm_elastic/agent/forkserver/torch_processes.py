"""The workers of one round, started by torch's own start_processes: for a torch that lacks a hook of the fork server.

Only what torch documents is used here. Compared with the fork server: each worker imports torch, a round
that fails ends only after torch has stopped the other workers (SIGTERM, after 30 s SIGKILL), and an agent that is
killed by SIGKILL leaves its workers to Slurm.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing import RunProcsResult, start_processes

from slurm_elastic.agent.forkserver._processes import kill_orphans
from slurm_elastic.agent.forkserver.protocol import wait_on

_POLL_INTERVAL = 0.1
"""Seconds between two polls of the workers, as in torch's own agent: start_processes tells the end of no function."""
_KILLED_WITHIN = 5.0
"""Seconds after SIGKILL in which a process has to be gone, unless the kernel holds it."""


class TorchProcesses:
    """See `slurm_elastic.agent.workers.processes.WorkerProcesses`; the options are those of torch's start_processes.

    `should_stop` is not used: torch's start cannot be interrupted.
    """

    def __init__(self, *, should_stop: Callable[[], bool] | None = None, **options: Any) -> None:
        with signal_handlers_kept():
            self._context = start_processes(**options)
        self._pids = dict(self._context.pids())
        self._pidfds = {rank: os.pidfd_open(pid) for rank, pid in self._pids.items()}
        self._unended: tuple[int, ...] = ()
        self._closed = threading.Event()
        self._tick_reader, self._tick_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._write_ticks, name="slurm-elastic-workers", daemon=True)
        self._thread.start()

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return dict(self._pids)

    def exit_fds(self) -> list[int]:
        """Return a descriptor that becomes readable every 0.1 s, to poll the workers."""
        return [self._tick_reader]

    def running_fds(self) -> list[int]:
        """Return descriptors of the workers that still run; each becomes readable when its worker has ended."""
        ended = wait_on(self._pidfds.values(), 0)
        return [descriptor for descriptor in self._pidfds.values() if descriptor not in ended]

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """See torch's PContext.wait."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._tick_reader, 4096)
        return self._context.wait(timeout, period)

    def all_ended(self) -> bool:
        """Return True if no worker runs any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._tick_reader, 4096)
        return not self.running_fds()

    def leave_out(self, is_consequence: Callable[[int, str], bool]) -> None:
        """Do nothing: torch shows the output."""

    def stderr_of(self, local_rank: int) -> str:
        """Return the path of the file that a worker's stderr goes to; empty if it goes to no file."""
        return str(self._context.stderrs[local_rank])

    def signal(self, number: signals.Signals) -> None:
        """Signal the process groups of the workers that still run."""
        running = self.running_fds()
        for rank, pid in self._pids.items():
            if self._pidfds.get(rank) in running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # A function's process is in the process group of the agent; a script's process leads its own.
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)

    def close(self, death_sig: signals.Signals | None = None, timeout: int = 30) -> None:
        """Signal the workers that still run, kill them after `timeout` seconds, and close their output."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self.signal(death_sig or signals.SIGTERM)
        self._context.close(death_sig, timeout)
        # The agent is a subreaper: what the workers started is its child now.
        kill_orphans(set(self._pids.values()), _KILLED_WITHIN)
        running = self.running_fds()
        self._unended = tuple(self._pids[rank] for rank, descriptor in self._pidfds.items() if descriptor in running)
        for descriptor in (self._tick_reader, self._tick_writer, *self._pidfds.values()):
            os.close(descriptor)
        self._pidfds.clear()

    def left(self) -> tuple[int, ...]:
        """Return the pids of the processes that `close` could not end (uninterruptible sleep)."""
        return self._unended

    def _write_ticks(self) -> None:
        while not self._closed.wait(_POLL_INTERVAL):
            with contextlib.suppress(BlockingIOError):
                os.write(self._tick_writer, b".")


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Keep the agent's signal handlers: PContext.start replaces them (torch 2.15)."""
    kept = {number: signals.getsignal(number) for number in signals.valid_signals()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and signals.getsignal(number) is not handler:
                signals.signal(number, handler)
