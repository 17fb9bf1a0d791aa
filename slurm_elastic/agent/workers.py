"""The worker processes of one round on one node, as fresh interpreters.

torch's SubprocessContext, except for what hurts an agent that must not wait: a failed worker does not make it block on
the others, signals are left to the agent, and no process of a worker's group outlives the round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal as signals
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Protocol, runtime_checkable

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsSpecs, RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.api import macros

__all__ = ["ColdWorkers", "WorkerGroupProcesses", "start_workers"]

_KILLED_WITHIN = 5
"""Seconds after SIGKILL in which a process has to be gone, unless the kernel holds it."""


@runtime_checkable
class WorkerGroupProcesses(Protocol):
    """What the agent needs of the processes of a round."""

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""

    def exit_fds(self) -> list[int]:
        """Descriptors that become readable when a worker ends, of the workers whose end was not seen yet."""

    def stderr_of(self, local_rank: int) -> str:
        """The file that a worker's stderr goes to, empty if to none."""

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """See PContext.wait; with timeout 0 it never blocks."""

    def all_ended(self) -> bool:
        """Whether no worker runs any more."""

    def signal(self, number: signals.Signals) -> None:
        """Send a signal to the process groups of the workers that still run."""

    def close(self, death_sig: signals.Signals | None = None, timeout: int = 30) -> None:
        """End whatever is left of the workers and their process groups, and their output."""


class ColdWorkers(SubprocessContext):
    """One fresh interpreter, or another program, per local rank."""

    def start(self) -> None:
        """Start the workers. Unlike PContext.start (torch 2.13) this leaves the agent's signal handlers alone."""
        self._start()  # type: ignore[no-untyped-call]
        self._exits = {rank: os.pidfd_open(pid) for rank, pid in self.pids().items()}
        self._leftovers: set[int] = set()
        for tail_log in self._tail_logs:
            tail_log.start()

    def exit_fds(self) -> list[int]:
        """See WorkerGroupProcesses."""
        return [fd for rank, fd in self._exits.items() if rank in self._running_local_ranks]

    def stderr_of(self, local_rank: int) -> str:
        """See WorkerGroupProcesses."""
        return self.stderrs[local_rank]

    def all_ended(self) -> bool:
        """See WorkerGroupProcesses."""
        self._collect()
        return not self._running_local_ranks

    def signal(self, number: signals.Signals) -> None:
        """See WorkerGroupProcesses."""
        for rank in self._running_local_ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.subprocess_handlers[rank].proc.pid, number)

    def _poll(self) -> RunProcsResult | None:
        self._collect()
        if not self._failures and self._running_local_ranks:
            return None
        result = RunProcsResult(failures=dict(self._failures), stdouts=self.stdouts, stderrs=self.stderrs)
        if not self._failures:
            result.return_values = dict.fromkeys(range(self.nprocs))
        return result

    def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
        for rank in self._running_local_ranks:
            process = self.subprocess_handlers[rank].proc
            code = process.poll()
            if code is None:
                continue
            done_local_ranks.add(rank)
            if code != 0:
                error_file = whole_error_file(self.error_files[rank])
                self._failures[rank] = ProcessFailure(rank, process.pid, code, error_file)

    def _collect(self) -> None:
        ended: set[int] = set()
        self._capture_process_failures(ended)
        self._running_local_ranks -= ended
        for rank in ended:
            group = self.subprocess_handlers[rank].proc.pid
            # Asked for at once: later the number may belong to somebody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, 0)
                self._leftovers.add(group)

    def _close(self, death_sig: signals.Signals, timeout: int = 30) -> None:
        super()._close(death_sig, min(timeout, _KILLED_WITHIN) if death_sig is signals.SIGKILL else timeout)
        self._collect()
        for group in self._leftovers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signals.SIGKILL)
        for fd in self._exits.values():
            os.close(fd)
        self._exits = {}


def whole_error_file(path: str) -> str:
    """The path, or nothing if the file is torn.

    A worker that is killed while ``@record`` writes leaves half a file, and ProcessFailure (torch 2.13,
    elastic/multiprocessing/errors/__init__.py) raises on one that is not JSON, which would end the agent.
    """
    try:
        json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    return path


def start_workers(
    spec: WorkerSpec, envs: Mapping[int, dict[str, str]], logs_specs: LogsSpecs, prefix_template: str | None
) -> WorkerGroupProcesses:
    """Start the workers of a round.

    Args:
        spec: torch's description of the workers.
        envs: what to add to the environment, by local rank.
        logs_specs: where the output goes.
        prefix_template: torch's template of the prefix of every line that is also shown.
    """
    if not isinstance(spec.entrypoint, str):
        raise TypeError("a function cannot be started as a fresh interpreter")
    context = ColdWorkers(
        name=spec.role,
        entrypoint=spec.entrypoint,
        args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
        envs=dict(envs),
        logs_specs=logs_specs,
        log_line_prefixes=line_prefixes(prefix_template, spec, envs),
        numa_options=spec.numa_options,
        duplicate_stdout_filters=spec.duplicate_stdout_filters,
        duplicate_stderr_filters=spec.duplicate_stderr_filters,
    )
    context.start()
    return context


def line_prefixes(template: str | None, spec: WorkerSpec, envs: Mapping[int, dict[str, str]]) -> dict[int, str] | None:
    """The prefix of the lines of every local rank (torch 2.13, local_elastic_agent.py, _start_workers)."""
    if not template:
        return None
    return {
        rank: Template(template).safe_substitute(role_name=spec.role, rank=env["RANK"], local_rank=rank)
        for rank, env in envs.items()
    }
