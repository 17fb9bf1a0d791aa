"""The workers of one round under torch's PContext.

The one file here that touches what torch 2.13 does not promise to keep: PContext's abstract methods and `_tail_logs`
(torch/distributed/elastic/multiprocessing/api.py), what a TailLog follows (tail_log.py beside it), and the NUMA wrapper
of commands (torch/numa/binding.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal as signals
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, ProcessFailure, RunProcsResult
from torch.numa.binding import NumaOptions
from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as _wrap_with_numa_binding

from slurm_elastic.agent.forkserver._fork_eligibility import SWITCHED_OFF
from slurm_elastic.agent.forkserver._function_call import packed_call, unpacked_result
from slurm_elastic.agent.forkserver._memfd import memory_file, read_memory_file
from slurm_elastic.agent.forkserver._numa import bound_cpus
from slurm_elastic.agent.forkserver._protocol import Order, State
from slurm_elastic.agent.forkserver._waiting import wait_on
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.worker_command import FUNCTION
from slurm_elastic.agent.log_tail import Followed, LogTimes, Tail
from slurm_elastic.ownership import write_own

__all__ = ["ForkServerContext", "start_workers"]

logger = logging.getLogger(__name__)

_DEVICE = next(name for name in ("device_index", "gpu_index") if name in signature(_wrap_with_numa_binding).parameters)
"""gpu_index until torch 2.13."""
_KILLED_WITHIN = 5.0
"""Seconds after SIGKILL in which a process has to be gone, unless the kernel holds it."""


def start_workers(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    warm: ForkServer,
    should_stop: Callable[[], bool] | None = None,
) -> ForkServerContext:
    """Start one worker per local rank, warm if possible; otherwise cold, with one line in the log that says why.

    The arguments up to `duplicate_stderr_filters` are those of torch's start_processes. `start_method` is not used:
    functions start as multiprocessing's spawn starts them.

    Args:
        name: See torch.
        entrypoint: See torch.
        args: See torch.
        envs: See torch.
        logs_specs: See torch.
        log_line_prefixes: See torch.
        start_method: Not used.
        numa_options: See torch.
        duplicate_stdout_filters: See torch.
        duplicate_stderr_filters: See torch.
        warm: The process that starts them.
        should_stop: Asked every 0.1 s while the fork server still imports.

    Raises:
        UsageError: a preload cannot be imported.
        StartInterruptedError: `should_stop` said so.
        OSError: a worker could not be started.
    """
    context = ForkServerContext(
        name,
        entrypoint,
        args,
        envs,
        logs_specs,
        log_line_prefixes,
        numa_options,
        duplicate_stdout_filters,
        duplicate_stderr_filters,
        warm=warm,
        should_stop=should_stop,
    )
    try:
        context.start()
    except BaseException:
        context.close(signals.SIGKILL)
        raise
    return context


class ForkServerContext(PContext):
    """The workers that one call of `start_workers` started, warm or cold."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None,
        numa_options: NumaOptions | None,
        duplicate_stdout_filters: list[str] | None,
        duplicate_stderr_filters: list[str] | None,
        *,
        warm: ForkServer,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        followed = [each for tail in self._tail_logs for each in _files_of(tail)]
        self._tail_logs: list[Any] = [Tail(followed, self._log_times())]
        self._warm = warm
        self._numa_options = numa_options
        self._should_stop = should_stop
        self._pids: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._exits: dict[int, int] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._results: dict[int, int] = {}
        self._return_values: dict[int, Any] = {}
        self._swept = False
        self._left: tuple[int, ...] = ()

    def start(self) -> None:
        """Start the workers. Unlike torch's, leaves the signal handlers of this process alone: they are the agent's."""
        self._start()
        for tail in self._tail_logs:
            tail.start()

    def _log_times(self) -> LogTimes | None:
        """Return what notes the times of the logs; None if no stream goes to a file of its own."""
        logs = [path for by_rank in (self.stdouts, self.stderrs) for path in by_rank.values() if _is_log(path)]
        return LogTimes(str(Path(logs[0]).with_name("times.jsonl")), logs) if logs else None

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return dict(self._pids)

    def exit_fds(self) -> list[int]:
        """Descriptors of which one becomes readable when a worker has ended; then call `exits` or `wait(0)`."""
        return [self._warm.fileno()] if self._warm.state is not State.DEAD else []

    def exits(self) -> dict[int, int]:
        """Exit codes, or minus signal numbers, by local rank, of the workers that have ended; changes nothing."""
        self._warm.read()
        for rank, pid in self._pids.items():
            if pid in self._warm.exit_codes:
                self._note_exit(rank, self._warm.exit_codes.pop(pid))
        return dict(self._exits)

    def running_fds(self) -> list[int]:
        """Descriptors of the workers that still run; each becomes readable when its worker has ended.

        Unlike `exits` this does not wait for the fork server, which may be busy importing for up to a second.
        """
        ended = wait_on(self._ends.values(), 0)
        return [descriptor for descriptor in self._ends.values() if descriptor not in ended]

    def signal(self, number: signals.Signals) -> None:
        """Signal the workers' process groups; returns at once."""
        if self._warm.state is State.DEAD:
            return
        for pid in self._pids.values():
            # Until the round is swept the fork server keeps even the dead as zombies, so the group is still theirs.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def all_ended(self) -> bool:
        """Return whether no worker runs any more."""
        self.exits()
        return not self.running_fds()

    def left(self) -> tuple[int, ...]:
        """The processes that `close` could not end: the kernel holds them, in uninterruptible sleep."""
        return self._left

    def stderr_of(self, local_rank: int) -> str:
        """The file that a worker's standard error goes to, empty if to none."""
        return self.stderrs[local_rank]

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """As torch's, but wakes when a worker ends instead of looking now and then, and leaves `close` to the caller.

        After a failure torch's contexts stop the other workers before they return, for as long as that takes.
        """
        end = None if timeout < 0 else time.monotonic() + timeout
        while True:
            result = self._poll()
            left = None if end is None else end - time.monotonic()
            if result is not None or (left is not None and left <= 0):
                return result
            wait_on(self.exit_fds(), left)

    def _start(self) -> None:
        self._warm.wait_ready(float("inf"), self._should_stop)
        self._warm.renew()
        self._warm.wait_ready(float("inf"), self._should_stop)
        self._warm.check_preload()
        orders: list[Order] = []
        try:
            orders.extend(self._order(rank, {**os.environ, **self.envs[rank]}) for rank in range(self.nprocs))
            self._pids = self._start_orders(orders)
            self._ends = {rank: os.pidfd_open(pid) for rank, pid in self._pids.items()}
        finally:
            for order in orders:
                for stream, descriptor in order.descriptors.items():
                    if stream != "result":
                        os.close(descriptor)

    def _start_orders(self, orders: list[Order]) -> dict[int, int]:
        obstacles = (self._warm.obstacle(order.command, order.environment) for order in orders)
        obstacle = next((found for found in obstacles if found is not None), None)
        if obstacle is not None:
            level = logging.INFO if obstacle == SWITCHED_OFF else logging.WARNING
            logger.log(level, "workers start cold: %s", obstacle)
            self._warm.revive()
        try:
            return self._warm.start_workers(orders, warm=obstacle is None, should_stop=self._should_stop)
        except OSError:
            if obstacle is not None or self._warm.state is not State.DEAD:
                raise
            # It died under the orders, and what it had started died with it.
            return self._start_orders(orders)

    def _command(self, rank: int) -> tuple[str, ...]:
        if isinstance(self.entrypoint, str):
            return (self.entrypoint, *(str(argument) for argument in self.args[rank]))
        return tuple(FUNCTION.command())

    def _order(self, rank: int, environment: dict[str, str]) -> Order:
        command = self._command(rank)
        # What torch decides for a cold worker, it decides here for a warm one too.
        bound = _wrap_with_numa_binding(command, **{_DEVICE: rank}, numa_options=self._numa_options)
        descriptors = {}
        for stream, path in (("stdout", self.stdouts[rank]), ("stderr", self.stderrs[rank])):
            if path:
                descriptors[stream] = _opened(path)
        if not isinstance(self.entrypoint, str):
            descriptors["call"] = memory_file(packed_call(self.name, self.entrypoint, self.args[rank]))
            descriptors["result"] = self._results[rank] = memory_file()
        arguments = command[1 + len(self._warm.program.options) :] if self._warm.program else ()
        return Order(rank, arguments, command, bound, environment, bound_cpus(bound, command), descriptors)

    def _poll(self) -> RunProcsResult | None:
        exits = self.exits()
        if not self._failures and len(exits) < self.nprocs:
            return None
        if self._failures:
            return RunProcsResult(failures=dict(self._failures), stdouts=self.stdouts, stderrs=self.stderrs)
        values = self._return_values or dict.fromkeys(range(self.nprocs))
        return RunProcsResult(return_values=values, stdouts=self.stdouts, stderrs=self.stderrs)

    def _close(self, death_sig: signals.Signals, timeout: float = 30) -> None:
        """Signal the workers, and after at most `timeout` seconds kill them and all that they left."""
        if self._swept:
            return
        end = time.monotonic() + timeout
        if death_sig != signals.SIGKILL and not self.all_ended():
            self.signal(death_sig)
            while (running := self.running_fds()) and time.monotonic() < end:
                wait_on(running, end - time.monotonic())
        self._left = tuple(self._warm.sweep(_KILLED_WITHIN))
        self.exits()
        for descriptor in (*self._results.values(), *self._ends.values()):
            os.close(descriptor)
        self._results.clear()
        self._ends.clear()
        self._swept = True

    def _note_exit(self, rank: int, code: int) -> None:
        self._exits[rank] = code
        if code != 0:
            self._failures[rank] = self._failure(rank, code)
        elif rank in self._results:
            descriptor = self._results.pop(rank)
            self._return_values[rank] = unpacked_result(read_memory_file(descriptor))

    def _failure(self, rank: int, code: int) -> ProcessFailure:
        try:
            return ProcessFailure(rank, self._pids[rank], code, self.error_files[rank])
        except Exception:
            # Raised for a file that is not what @record writes: a worker killed while it wrote leaves half of one.
            return ProcessFailure(rank, self._pids[rank], code, "")


def _files_of(tail: Any) -> list[Followed]:
    """Return what one of torch's TailLogs would follow."""
    prefixes = tail._log_line_prefixes or {}
    return [
        Followed(path, prefixes.get(rank, f"[{tail._name}{rank}]:"), tail._dst, tail._log_line_filter)
        for rank, path in tail._log_files.items()
    ]


def _is_log(path: str) -> bool:
    return bool(path) and not path.startswith("/dev/")


def _opened(path: str) -> int:
    """A stream's file, or the console or /dev/null, which torch names by their paths."""
    if path.startswith("/dev/"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return write_own(path)
