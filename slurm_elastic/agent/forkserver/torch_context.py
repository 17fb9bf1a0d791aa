"""The workers of one round under torch's PContext.

The one file here that touches what torch 2.13 does not promise to keep: PContext's abstract methods and `_tail_logs`
(torch/distributed/elastic/multiprocessing/api.py), what a TailLog follows (tail_log.py beside it), and the NUMA wrapper
of commands (torch/numa/binding.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.spawn
import os
import pickle
import re
import signal as signals
import sys
import time
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import PContext, ProcessFailure, RunProcsResult
from torch.numa.binding import NumaOptions
from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as _wrap_with_numa_binding

from slurm_elastic.agent.forkserver._fork_eligibility import SWITCHED_OFF
from slurm_elastic.agent.forkserver._linux import memory_file, read_memory_file
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.protocol import Order, State, wait_on
from slurm_elastic.agent.forkserver.worker_command import FUNCTION
from slurm_elastic.agent.node.devices import asked_apart
from slurm_elastic.agent.workers.output import FollowedFile, LastWords, LogTimes, Tail
from slurm_elastic.ownership import write_own

logger = logging.getLogger(__name__)

_DEVICE = next(name for name in ("device_index", "gpu_index") if name in signature(_wrap_with_numa_binding).parameters)
"""gpu_index until torch 2.13."""
_KILLED_WITHIN = 5.0
"""Seconds after SIGKILL in which a process has to be gone, unless the kernel holds it."""


def start_workers(*of_torch: Any, **options: Any) -> ForkServerContext:
    """Start one worker per local rank, warm if possible; otherwise cold, with one line in the log that says why.

    See `ForkServerContext` for the arguments. Functions start as multiprocessing's spawn starts them.

    Raises:
        UsageError: A preload cannot be imported.
        StartInterruptedError: `should_stop` has returned True.
        OSError: A worker could not be started.
    """
    context = ForkServerContext(*of_torch, **options)
    with contextlib.ExitStack() as failed:
        failed.callback(context.close, signals.SIGKILL)
        context.start()
        failed.pop_all()
    return context


class ForkServerContext(PContext):
    """The workers of one round, warm or cold.

    Args:
        should_stop: Called every 0.1 s while the fork server still imports; the start ends when it returns True.
        brief: True to hold back the last words of workers from the console until they have ended.
    """

    def __init__(
        self,
        *of_torch: Any,
        fork_server: ForkServer,
        numa_options: NumaOptions | None = None,
        should_stop: Callable[[], bool] | None = None,
        brief: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*of_torch, **options)
        followed = [log_file for tail in self._tail_logs for log_file in _files_of(tail)]
        self._last_words = dict[int, LastWords]()
        self._exits: dict[int, int] = {}
        for rank, path in self.stderrs.items() if brief else ():
            words = self._last_words[rank] = LastWords(functools.partial(self._exits.__contains__, rank))
            for each in followed:
                if each.path == path and each.destination is sys.stderr:
                    each.last_words = words
        # The streams that go to files of their own, whose lines get times.
        paths = (*self.stdouts.values(), *self.stderrs.values())
        logs = [path for path in paths if path and not path.startswith("/dev/")]
        times = LogTimes(str(Path(logs[0]).with_name("times.jsonl")), logs) if logs else None
        self._tail_logs: list[Any] = [Tail(followed, times)]
        self._fork_server = fork_server
        self._numa_options = numa_options
        self._should_stop = should_stop
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._results: dict[int, int] = {}
        self._return_values: dict[int, Any] = {}
        self._swept = False
        self._unended: tuple[int, ...] = ()

    def start(self) -> None:
        """Start the workers. Unlike torch's, this keeps the signal handlers of the process, which are the agent's."""
        self._start()
        for tail in self._tail_logs:
            tail.start()

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return dict(self._pids)

    def exit_fds(self) -> list[int]:
        """Return descriptors, one of which becomes readable when a worker has ended; then call `exits` or `wait(0)`."""
        return [self._fork_server.fileno()] if self._fork_server.state is not State.DEAD else []

    def exits(self) -> dict[int, int]:
        """Return the exit codes, or minus signal numbers, of the workers that have ended, by local rank."""
        self._fork_server.read()
        for rank, pid in self._pids.items():
            if pid in self._fork_server.exit_codes:
                self._note_exit(rank, self._fork_server.exit_codes.pop(pid))
        return dict(self._exits)

    def running_fds(self) -> list[int]:
        """Return descriptors of the workers that still run; each becomes readable when its worker has ended.

        Unlike `exits` this does not wait for the fork server, which may be busy importing for up to a second.
        """
        ended = wait_on(self._pidfds.values(), 0)
        return [descriptor for descriptor in self._pidfds.values() if descriptor not in ended]

    def signal(self, number: signals.Signals) -> None:
        """Signal the workers' process groups; returns at once."""
        if self._fork_server.state is State.DEAD:
            return
        for pid in self._pids.values():
            # The fork server reaps workers when it sweeps the round: until then no other process gets their group id.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def all_ended(self) -> bool:
        """Return True if no worker runs any more."""
        self.exits()
        return not self.running_fds()

    def left(self) -> tuple[int, ...]:
        """Return the pids of the processes that `close` could not end (uninterruptible sleep)."""
        return self._unended

    def stderr_of(self, local_rank: int) -> str:
        """Return the path of the file that a worker's stderr goes to; empty if it goes to no file."""
        return self.stderrs[local_rank]

    def leave_out(self, is_consequence: Callable[[int, str], bool]) -> None:
        """See `WorkerProcesses`."""
        for rank, words in self._last_words.items():
            words.is_consequence = functools.partial(is_consequence, rank)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait as torch's does, but without polling, and without closing.

        After a failure torch's contexts stop the other workers before they return; here the caller does that.
        """
        end = None if timeout < 0 else time.monotonic() + timeout
        while True:
            result = self._poll()
            left = None if end is None else end - time.monotonic()
            if result is not None or (left is not None and left <= 0):
                return result
            wait_on(self.exit_fds(), left)

    def _start(self) -> None:
        self._fork_server.wait_ready(float("inf"), self._should_stop)
        self._fork_server.refresh()
        self._fork_server.wait_ready(float("inf"), self._should_stop)
        self._fork_server.check_preload()
        orders: list[Order] = []
        try:
            orders.extend(self._order(rank, {**os.environ, **self.envs[rank]}) for rank in range(self.nprocs))
            self._pids = self._start_orders(orders)
            self._pidfds = {rank: os.pidfd_open(pid) for rank, pid in self._pids.items()}
        finally:
            for order in orders:
                for stream, descriptor in order.descriptors.items():
                    if stream != "result":
                        os.close(descriptor)

    def _start_orders(self, orders: list[Order]) -> dict[int, int]:
        obstacles = (self._fork_server.obstacle(order.command, order.environment) for order in orders)
        obstacle = next((reason for reason in obstacles if reason is not None), None)
        if obstacle is not None:
            level = logging.INFO if obstacle == SWITCHED_OFF else logging.WARNING
            logger.log(level, "workers start cold: %s", obstacle)
            self._fork_server.restart_cold()
        try:
            return self._fork_server.start_workers(orders, warm=obstacle is None, should_stop=self._should_stop)
        except OSError:
            if obstacle is not None or self._fork_server.state is not State.DEAD:
                raise
            # The fork server has died, and the workers that it had started died with it: start all of them again.
            return self._start_orders(orders)

    def _command(self, rank: int) -> tuple[str, ...]:
        if isinstance(self.entrypoint, str):
            return (self.entrypoint, *(str(argument) for argument in self.args[rank]))
        return tuple(FUNCTION.command())

    def _order(self, rank: int, environment: dict[str, str]) -> Order:
        command = self._command(rank)
        # A warm worker gets the NUMA binding that torch would put in front of a cold worker's command.
        bound = (*numa_prefixes(self.nprocs, self._numa_options)[rank], *command)
        descriptors = {}
        for stream, path in (("stdout", self.stdouts[rank]), ("stderr", self.stderrs[rank])):
            if path:
                descriptors[stream] = _opened(path)
        if not isinstance(self.entrypoint, str):
            descriptors["call"] = memory_file(packed_call(self.name, self.entrypoint, self.args[rank]))
            descriptors["result"] = self._results[rank] = memory_file()
        arguments = command[1 + len(self._fork_server.program.options) :] if self._fork_server.program else ()
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
        self._unended = tuple(self._fork_server.sweep(_KILLED_WITHIN))
        self.exits()
        for descriptor in (*self._results.values(), *self._pidfds.values()):
            os.close(descriptor)
        self._results.clear()
        self._pidfds.clear()
        self._swept = True

    def _note_exit(self, rank: int, code: int) -> None:
        self._exits[rank] = code
        if code != 0:
            self._failures[rank] = self._failure(rank, code)
        elif rank in self._results:
            # Empty if the function has ended the process.
            result = read_memory_file(self._results.pop(rank))
            self._return_values[rank] = pickle.loads(result) if result else None

    def _failure(self, rank: int, code: int) -> ProcessFailure:
        try:
            return ProcessFailure(rank, self._pids[rank], code, self.error_files[rank])
        except Exception:
            # The error file is not what @record writes: a worker killed while it writes leaves half of one.
            return ProcessFailure(rank, self._pids[rank], code, "")


def numa_prefixes(workers: int, options: NumaOptions | None) -> tuple[tuple[str, ...], ...]:
    """Return what torch puts in front of the command of each local rank to bind it to CPUs.

    Raises RuntimeError if there is no GPU, or no numactl.
    """
    return ((),) * workers if options is None else _asked_numa_prefixes(workers, options)


@functools.cache
def _asked_numa_prefixes(workers: int, options: NumaOptions) -> tuple[tuple[str, ...], ...]:
    def ask() -> tuple[tuple[str, ...], ...]:
        # torch logs a traceback of what it raises.
        logging.disable()
        command = ("",)
        bound = (_wrap_with_numa_binding(command, **{_DEVICE: rank}, numa_options=options) for rank in range(workers))
        return tuple(words[: -len(command)] for words in bound)

    # torch asks CUDA where each GPU is.
    return asked_apart(ask)


def bound_cpus(bound: tuple[str, ...], command: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the CPUs to which torch's NUMA wrapper has bound a command; None if it has left the command alone.

    Raises RuntimeError if it has changed the command in another way (torch/numa/binding.py, 2.13).
    """
    if bound == command:
        return None
    option = re.fullmatch(r"--physcpubind=([0-9,-]+)", bound[1])
    if option is None:
        raise RuntimeError(f"torch's NUMA binding is not understood: {' '.join(bound[:2])}")
    cpus: list[int] = []
    for part in option[1].split(","):
        first, _dash, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _files_of(tail: Any) -> list[FollowedFile]:
    prefixes = tail._log_line_prefixes or {}
    return [
        FollowedFile(path, prefixes.get(rank, f"[{tail._name}{rank}]:"), tail._dst, tail._log_line_filter)
        for rank, path in tail._log_files.items()
    ]


def _opened(path: str) -> int:
    """Open the file of a stream; torch names the console and /dev/null by their paths, too."""
    if path.startswith("/dev/"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return write_own(path)


# Passes the call of a function to its worker, and the result back to the agent.
#
# Both are in memory files that only the agent, the fork server and this one worker can open. The function has to be
# importable, as with multiprocessing's spawn, which is torch elastic's default for functions.
def packed_call(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Return the content of the call file: the state of `__main__`, the function and its arguments, pickled.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: The function or an argument cannot be pickled.
    """
    preparation = multiprocessing.spawn.get_preparation_data(name)
    # The key cannot be pickled outside of multiprocessing; the worker draws its own.
    preparation.pop("authkey", None)
    return pickle.dumps((preparation, pickle.dumps((function, tuple(arguments)))))


def main() -> None:
    """In the worker: call the function, and write its result."""
    from torch.distributed.elastic.multiprocessing.errors import record

    call, result = (int(text) for text in os.environ.pop("SLURM_ELASTIC_CALL").split(":"))
    os.set_inheritable(result, False)
    preparation, packed = pickle.loads(read_memory_file(call))
    # Makes the agent's __main__ importable, as for a child of multiprocessing, so that its functions can be found.
    multiprocessing.spawn.prepare(preparation)
    function, arguments = pickle.loads(packed)
    returned = record(function)(*arguments)
    with os.fdopen(result, "wb") as file:
        file.write(pickle.dumps(returned))
