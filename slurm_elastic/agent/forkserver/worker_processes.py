"""The workers of one round, in the way in which torch's agent asks for them.

The one thing here that torch does not promise to keep is the NUMA wrapper of commands (torch/numa/binding.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import multiprocessing.spawn
import os
import pickle
import re
import shutil
import signal as signals
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, TextIO

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, RunProcsResult
from torch.distributed.elastic.utils.api import macros
from torch.numa.binding import NumaOptions

from slurm_elastic.agent.forkserver._fork_eligibility import SWITCHED_OFF
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.linux import memory_file, read_memory_file
from slurm_elastic.agent.forkserver.protocol import Order, State, wait_on
from slurm_elastic.agent.forkserver.worker_command import FUNCTION
from slurm_elastic.agent.node.devices import asked_apart
from slurm_elastic.agent.workers.output import FollowedFile, LastWords, LogTimes, Tail
from slurm_elastic.ownership import write_own

logger = logging.getLogger(__name__)

_KILLED_WITHIN = 5.0
"""Seconds after SIGKILL in which a process has to be gone, unless the kernel holds it."""


class WorkerProcesses:
    """The workers of one round: one per local rank, warm if possible; otherwise cold, and one line in the log says why.

    Functions start as multiprocessing's spawn starts them.

    Args:
        spec: torch's description of the workers; the role begins the lines of their output.
        envs: The variables of each local rank beside the agent's own.
        fork_server: The process that starts them.
        logs_specs: Says where the output goes.
        prefix_template: The template of the prefix of lines, in place of the role and local rank.
        should_stop: Called every 0.1 s while the fork server still imports; the start ends when it returns True.
        brief: True to hold back the last words of workers from the console until they have ended.

    Raises:
        UsageError: A preload cannot be imported.
        StartInterruptedError: `should_stop` has returned True.
        OSError: A worker could not be started.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        envs: Mapping[int, dict[str, str]],
        should_stop: Callable[[], bool] | None = None,
        *,
        fork_server: ForkServer,
        logs_specs: LogsSpecs,
        prefix_template: str | None = None,
        brief: bool = False,
    ) -> None:
        self._spec, self._envs = spec, dict(envs)
        self._args = {rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs}
        prefixes = line_prefixes(prefix_template, spec, envs)
        files = logs_specs.reify(self._envs)
        # Paths by local rank; empty where the output goes to no file.
        self.stdouts, self.stderrs, self.error_files = files.stdouts, files.stderrs, files.error_files
        self._exits: dict[int, int] = {}
        self._last_words = {
            rank: LastWords(functools.partial(self._exits.__contains__, rank)) for rank in self.stderrs if brief
        }
        held_back = {self.stderrs[rank]: last for rank, last in self._last_words.items()}
        self._filtered: list[TextIO] = []
        followed: list[FollowedFile | LogTimes] = []
        for tee, console, words, path in (
            (files.tee_stdouts, sys.stdout, spec.duplicate_stdout_filters, files.filtered_stdout),
            (files.tee_stderrs, sys.stderr, spec.duplicate_stderr_filters, files.filtered_stderr),
        ):
            for rank, log in tee.items():
                followed.append(FollowedFile(log, prefixes[rank], console, last_words=held_back.get(log)))
            if words:
                self._filtered.append(open(path, "w", errors="replace", buffering=1))  # noqa: SIM115, PTH123
                chosen = self._filtered[-1], tuple(words)
                followed.extend(FollowedFile(log, prefixes[rank], *chosen) for rank, log in tee.items())
        # The streams that go to files of their own, whose lines get times.
        paths = (*self.stdouts.values(), *self.stderrs.values())
        logs = [path for path in paths if path and not path.startswith("/dev/")]
        if logs:
            followed.append(LogTimes(str(Path(logs[0]).with_name("times.jsonl")), logs))
        self._tail = Tail(followed)
        self._fork_server = fork_server
        self._should_stop = should_stop
        self._pids: dict[int, int] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._results: dict[int, int] = {}
        self._return_values: dict[int, Any] = {}
        self._swept = False
        self.unended: tuple[int, ...] = ()
        """The pids of the processes that `close` could not end (uninterruptible sleep)."""

        with contextlib.ExitStack() as failed:
            failed.callback(self.close, signals.SIGKILL)
            self._start()
            failed.pop_all()

    def _start(self) -> None:
        self._fork_server.wait_ready(float("inf"), self._should_stop)
        self._fork_server.refresh()
        self._fork_server.wait_ready(float("inf"), self._should_stop)
        orders: list[Order] = []
        try:
            orders.extend(self._order(rank) for rank in range(len(self._args)))
            self._pids = self._start_orders(orders)
        finally:
            for order in orders:
                for stream, descriptor in order.descriptors.items():
                    if stream != "result":
                        os.close(descriptor)
        self._tail.start()

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return dict(self._pids)

    def exit_fds(self) -> list[int]:
        """Return descriptors, one of which is readable when a worker has ended since the last call of `exits`."""
        return [self._fork_server.fileno()] if self._fork_server.state is not State.DEAD else []

    def exits(self) -> dict[int, int]:
        """Return the exit codes, or minus signal numbers, of the workers that have ended, by local rank."""
        self._fork_server.read()
        for rank, pid in self._pids.items():
            if pid in self._fork_server.exit_codes:
                self._note_exit(rank, self._fork_server.exit_codes.pop(pid))
        return dict(self._exits)

    def signal(self, number: signals.Signals) -> None:
        """Signal the workers' process groups; returns at once."""
        if self._fork_server.state is State.DEAD:
            return
        for pid in self._pids.values():
            # The fork server reaps workers when it sweeps the round: until then no other process gets their ids.
            with contextlib.suppress(PermissionError):
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:
                    # Forked, but setsid has not made it the leader of its group yet.
                    os.kill(pid, number)

    def all_ended(self) -> bool:
        """Return True if no worker runs any more."""
        return len(self.exits()) == len(self._pids)

    def leave_out(self, is_consequence: Callable[[int, str], bool]) -> None:
        """Do not show the last words of workers for which this returns True, by local rank; call it before `close`."""
        for rank, words in self._last_words.items():
            words.is_consequence = functools.partial(is_consequence, rank)

    def wait(self, _timeout: float = 0) -> RunProcsResult | None:
        """Return how the workers have ended, once one has failed or all have ended; torch asks with 0: never blocks."""
        exits = self.exits()
        if self._failures:
            return RunProcsResult(failures=dict(self._failures), stdouts=self.stdouts, stderrs=self.stderrs)
        if len(exits) < len(self._args):
            return None
        values = self._return_values or dict.fromkeys(self._args)
        return RunProcsResult(return_values=values, stdouts=self.stdouts, stderrs=self.stderrs)

    def close(self, death_sig: signals.Signals = signals.SIGTERM, timeout: float = 30) -> None:
        """Signal the workers, after at most `timeout` seconds kill them and what they left, and end their output."""
        if self._swept:
            return
        end = time.monotonic() + timeout
        if death_sig != signals.SIGKILL and not self.all_ended():
            self.signal(death_sig)
            while not self.all_ended() and (left := end - time.monotonic()) > 0:
                wait_on(self.exit_fds(), left)
        self.unended = tuple(self._fork_server.sweep(_KILLED_WITHIN))
        self.exits()
        for descriptor in self._results.values():
            os.close(descriptor)
        self._results.clear()
        self._swept = True
        self._tail.stop()
        for file in self._filtered:
            file.close()

    def _start_orders(self, orders: list[Order]) -> dict[int, int]:
        # Ranks differ in nothing that matters for this.
        obstacle = self._fork_server.obstacle(orders[0].command, orders[0].environment)
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

    def _order(self, rank: int) -> Order:
        entrypoint, args = self._spec.entrypoint, self._args[rank]
        assert entrypoint is not None
        environment, descriptors = {**os.environ, **self._envs[rank]}, {}
        for stream, path in (("stdout", self.stdouts[rank]), ("stderr", self.stderrs[rank])):
            if path:
                descriptors[stream] = _opened(path)
        if isinstance(entrypoint, str):
            command = (entrypoint, *map(str, args))
            if shutil.which(entrypoint, path=environment.get("PATH")) is None:
                raise OSError(f"{entrypoint} is no program that can be executed")
        else:
            command = tuple(FUNCTION.command())
            descriptors["call"] = memory_file(packed_call(self._spec.role, entrypoint, args))
            descriptors["result"] = self._results[rank] = memory_file()
        cpus = numa_cpus(len(self._args), self._spec.numa_options)[rank]
        return Order(rank, command, environment, cpus, descriptors)

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


@functools.cache
def numa_cpus(workers: int, options: NumaOptions | None) -> tuple[tuple[int, ...] | None, ...]:
    """Return the CPUs to which torch binds each local rank; None for all.

    Raises RuntimeError if there is no GPU, or no numactl, or if torch binds in another way than it did up to 2.15.
    """
    if options is None:
        return (None,) * workers
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as wrap

    # gpu_index until torch 2.13.
    device = "gpu_index" if "gpu_index" in inspect.signature(wrap).parameters else "device_index"

    def ask() -> tuple[tuple[int, ...] | None, ...]:
        # torch logs a traceback of what it raises.
        logging.disable()
        return tuple(bound_cpus(wrap(("",), **{device: rank}, numa_options=options)[:-1]) for rank in range(workers))

    # torch asks CUDA where each GPU is.
    return asked_apart(ask)


def bound_cpus(prefix: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the CPUs to which torch's NUMA wrapper binds a command by what it puts in front; None for nothing.

    Raises RuntimeError if that is something else (torch/numa/binding.py, 2.13).
    """
    if not prefix:
        return None
    option = re.fullmatch(r"--physcpubind=([0-9,-]+)", prefix[-1])
    if len(prefix) != 2 or option is None:
        raise RuntimeError(f"torch's NUMA binding is not understood: {' '.join(prefix)}")
    cpus: list[int] = []
    for part in option[1].split(","):
        first, _dash, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def line_prefixes(template: str | None, spec: WorkerSpec, envs: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """Return the prefix of the lines of every local rank (torch 2.15, local_elastic_agent.py, _start_workers).

    torch takes ``${hostname}`` from gethostname(2); here it is the node as Slurm names it.
    """
    prefix = Template(template or "[${role_name}${local_rank}]:")
    return {
        rank: prefix.safe_substitute(
            role_name=spec.role, rank=env["RANK"], local_rank=rank, hostname=env.get("SLURM_ELASTIC_NODE", "")
        )
        for rank, env in envs.items()
    }


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
