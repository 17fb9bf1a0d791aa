"""The worker processes of one round on one node."""

from __future__ import annotations

import functools
import signal as signals
from collections.abc import Callable, Iterable, Mapping
from string import Template
from typing import Protocol

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsSpecs, RunProcsResult
from torch.distributed.elastic.utils.api import macros
from torch.numa.binding import NumaOptions

from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.watchdog import process_state
from slurm_elastic.errors import UsageError


class WorkerProcesses(Protocol):
    """The processes of a round, as the agent uses them."""

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""

    def exit_fds(self) -> list[int]:
        """Return descriptors of which one becomes readable when `wait` may have a result."""

    def running_fds(self) -> list[int]:
        """Return descriptors of the workers that still run; each becomes readable when its worker has ended."""

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """See torch's PContext.wait; with timeout 0 it never blocks."""

    def all_ended(self) -> bool:
        """Return True if no worker runs any more."""

    def stderr_of(self, local_rank: int) -> str:
        """Return the file that a worker's stderr goes to, empty if there is none."""

    def leave_out(self, is_consequence: Callable[[int, str], bool]) -> None:
        """Do not show the last words of workers for which this returns True, by local rank; call it before `close`."""

    def signal(self, number: signals.Signals) -> None:
        """Send a signal to the process groups of the workers that still run."""

    def close(self, death_sig: signals.Signals | None = None, timeout: int = 30) -> None:
        """End what is left of the workers and their process groups, and the forwarding of their output."""

    def left(self) -> tuple[int, ...]:
        """Return the processes that `close` could not end: the kernel holds them, in uninterruptible sleep."""


Starter = Callable[[WorkerSpec, Mapping[int, dict[str, str]], Callable[[], bool]], WorkerProcesses]
"""Starts the workers of a round. Its arguments are torch's spec, the variables to add to the environment of each local
rank, and a function that is called every 0.1 s and returns True to interrupt the start."""


def require_numa_binding(workers: int, options: NumaOptions | None) -> None:
    """Have torch choose the CPUs of each worker now, if ``--numa-binding`` asks for it; later starts use its choice.

    Raises:
        UsageError: torch cannot bind workers on this node.
    """
    if options is None:
        return
    from slurm_elastic.agent.forkserver.torch_context import numa_prefixes

    try:
        numa_prefixes(workers, options)
    except Exception as error:
        # Without a GPU torch 2.13 raises an AssertionError, 2.14 a RuntimeError.
        raise UsageError(
            f"--numa-binding={options.affinity_mode.value} cannot bind the workers of this node: {error}; "
            "leave the option out, or fix that"
        ) from None


def worker_starter(
    fork_server: ForkServer | None, logs_specs: LogsSpecs, prefix_template: str | None, *, brief: bool = False
) -> Starter:
    """Return what starts workers: the fork server of this node, or torch itself.

    Args:
        fork_server: The fork server; None if it lacks something of this torch, see `workers.torch_hooks`.
        logs_specs: The destinations of the workers' output.
        prefix_template: torch's template for the prefix of each line on the console.
        brief: True to leave out the last words of workers that others have made fail; only the fork server's can.
    """

    started_by: Callable[..., WorkerProcesses]
    if fork_server is None:
        from slurm_elastic.agent.forkserver.torch_processes import TorchProcesses

        started_by = TorchProcesses
    else:
        # This module needs more hooks of torch than the agent.
        from slurm_elastic.agent.forkserver.torch_context import start_workers

        started_by = functools.partial(start_workers, fork_server=fork_server, brief=brief)

    def start(spec: WorkerSpec, envs: Mapping[int, dict[str, str]], should_stop: Callable[[], bool]) -> WorkerProcesses:
        assert spec.entrypoint is not None
        return started_by(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
            envs=dict(envs),
            logs_specs=logs_specs,
            log_line_prefixes=_prefixes(prefix_template, spec, envs),
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            should_stop=should_stop,
        )

    return start


def _prefixes(template: str | None, spec: WorkerSpec, envs: Mapping[int, dict[str, str]]) -> dict[int, str] | None:
    """Return the prefix of the lines of every local rank (torch 2.15, local_elastic_agent.py, _start_workers).

    torch takes ``${hostname}`` from gethostname(2); here it is the node as Slurm names it.
    """
    if not template:
        return None
    return {
        rank: Template(template).safe_substitute(
            role_name=spec.role, rank=env["RANK"], local_rank=rank, hostname=env["SLURM_ELASTIC_NODE"]
        )
        for rank, env in envs.items()
    }


def survivors(node: str, pids: Iterable[int]) -> str:
    """Return one line about processes that have survived SIGKILL."""
    shown = []
    for pid in pids:
        process = process_state(pid)
        # proc_pid_stat(5)
        waits = process is not None and process.state == "D"
        shown.append(f"{pid}{' in uninterruptible sleep' if waits else ''}")
    return (
        f"{node} has processes that SIGKILL does not end ({', '.join(shown)}), so it leaves the run; look at the node"
    )
