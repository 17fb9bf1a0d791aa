"""Runs a script as torchrun runs it and as a warm worker, to compare what came of both."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, RunProcsResult, Std, start_processes

from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.linux import children
from slurm_elastic.agent.forkserver.protocol import wait_on
from slurm_elastic.agent.forkserver.worker_command import Program
from slurm_elastic.agent.forkserver.worker_processes import WorkerProcesses
from tests.local.torch_signals import signal_handlers_kept

HANG = 120.0
"""Seconds after which a test gives up. Imports of torch take ten times as long where ten processes want a processor."""
LIGHT = Path(__file__).parents[1] / "light"
"""A module path with a torch that is imported at once."""


def with_light_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables, with which processes import that torch."""
    paths = [str(LIGHT), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass(frozen=True)
class Ended:
    """What is left of one worker."""

    code: int
    stdout: str
    stderr: str
    error: dict[str, Any] | None


class Workplace:
    """A directory with a script, modules beside it, a fork server for it, and the logs of its workers.

    Torch is a light one, unless `with_torch`. Workers have those variables that are the fork server's alone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        program: Program | None = None,
        arguments: Sequence[str] = (),
        modules: Mapping[str, str] | None = None,
        entrypoint: str | Callable[..., Any] = sys.executable,
        environment: Mapping[str, str] = os.environ,
        with_torch: bool = False,
        **options: Any,
    ) -> None:
        self.directory = directory
        self.script = directory / "train.py"
        self.script.touch()
        for name, source in (modules or {}).items():
            (directory / f"{name}.py").write_text(source)
        self.entrypoint = entrypoint
        self.program = program or Program.script(str(self.script), arguments)
        given = dict(environment) if with_torch else with_light_torch(environment)
        self.variables = {name: value for name, value in given.items() if os.environ.get(name) != value}
        self.fork_server = ForkServer(self.program, environment=given, **options)

    def close(self) -> None:
        self.fork_server.close()

    def left(self) -> list[int]:
        """The children of the fork server: none is to take its place where nothing is learned or preloaded."""
        return children(self.fork_server.pid)

    def context(
        self, arguments: Sequence[Any] = (), environment: Mapping[str, str] | None = None, workers: int = 1
    ) -> WorkerProcesses:
        name, entrypoint, args, envs, logs_specs = self.call(arguments, environment, workers)
        spec = WorkerSpec(name, workers, None, entrypoint=entrypoint, args=args[0])  # type: ignore[arg-type]
        return WorkerProcesses(spec, envs, fork_server=self.fork_server, logs_specs=logs_specs)

    @contextlib.contextmanager
    def running(self, *args: Any, **options: Any) -> Iterator[WorkerProcesses]:
        """Such a context, of which nothing is left at the end."""
        context = self.context(*args, **options)
        try:
            yield context
        finally:
            context.close(signal.SIGKILL)

    def call(self, arguments: Sequence[Any], environment: Mapping[str, str] | None, workers: int) -> tuple[Any, ...]:
        variables = {**self.variables, **(environment or {})}
        args = (*self.program.options, *arguments) if isinstance(self.entrypoint, str) else tuple(arguments)
        return (
            "test",
            self.entrypoint,
            dict.fromkeys(range(workers), args),
            {rank: {"RANK": str(rank), "LOCAL_RANK": str(rank), **variables} for rank in range(workers)},
            DefaultLogsSpecs(str(self.directory / "logs"), redirects=Std.ALL),
        )

    def run_warm(self, arguments: Sequence[Any] = (), environment: Mapping[str, str] | None = None) -> Ended:
        return self.ended(self.context(arguments, environment))

    def run_plain(self, arguments: Sequence[Any] = (), environment: Mapping[str, str] | None = None) -> Ended:
        with signal_handlers_kept():
            return self.ended(start_processes(*self.call(arguments, environment, 1)))

    def ended(self, context: WorkerProcesses | PContext) -> Ended:
        try:
            result = result_of(context) if isinstance(context, WorkerProcesses) else context.wait(HANG, 0.01)
            assert result is not None, "it hangs"
            return self.read(context, result)
        finally:
            context.close(signal.SIGKILL)

    def read(self, context: WorkerProcesses | PContext, result: RunProcsResult) -> Ended:
        error = Path(context.error_files[0])
        return Ended(
            result.failures[0].exitcode if result.failures else 0,
            Path(context.stdouts[0]).read_text(),
            Path(context.stderrs[0]).read_text(),
            json.loads(error.read_text()) if error.exists() else None,
        )


def result_of(workers: WorkerProcesses, seconds: float = HANG) -> RunProcsResult:
    """Wait until the workers have ended, or one has failed."""
    end = time.monotonic() + seconds
    while (result := workers.wait()) is None:
        assert wait_on(workers.exit_fds(), end - time.monotonic()), "it hangs"
    return result


def comparable(ended: Ended) -> Ended:
    """What came of a worker, without what differs from process to process: addresses, times, loaded extensions."""
    stderr = re.sub(r"0x[0-9a-f]+", "0x", ended.stderr)
    stderr = re.sub(r"\n\nExtension modules: .*", "", stderr)
    error = json.loads(re.sub(r'"timestamp": "\d+"', '"timestamp": ""', json.dumps(ended.error)))
    return Ended(ended.code, re.sub(r"0x[0-9a-f]+", "0x", ended.stdout), stderr, error)
