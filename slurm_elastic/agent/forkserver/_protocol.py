"""The states of a fork server, and the order to start a worker."""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.agent.forkserver._memfd import memory_file


class State(enum.Enum):
    """The state of a fork server."""

    IMPORTING = "importing"
    WARM = "warm"
    COLD = "cold"
    """The fork server executes workers; it cannot fork them."""
    BROKEN = "broken"
    """A preload cannot be imported."""
    DEAD = "dead"


class StartInterruptedError(Exception):
    """The caller asked to stop waiting for workers to start."""


@dataclass(frozen=True, slots=True)
class Order:
    """One worker to start."""

    rank: int
    """Local rank."""
    arguments: tuple[str, ...]
    """The script's own arguments."""
    command: tuple[str, ...]
    """The whole command of the worker, as sys.orig_argv shows it."""
    execute: tuple[str, ...]
    """The command that a cold start executes, perhaps behind numactl."""
    environment: Mapping[str, str]
    cpus: tuple[int, ...] | None
    """CPUs to bind a warm worker to."""
    descriptors: Mapping[str, int]
    """Open files by name (stdout, stderr, call, result); those not named are the agent's own."""

    @contextlib.contextmanager
    def described(self, how: str) -> Iterator[int]:
        """Write the order to a memory file and yield its descriptor; `how` is "fork" or "exec"."""
        details = {
            "how": how,
            "streams": list(self.descriptors),
            "arguments": self.arguments,
            "command": self.command,
            "execute": self.execute,
            "environment": dict(self.environment),
            "cpus": self.cpus,
            "directory": str(Path.cwd()),
        }
        file = memory_file(json.dumps(details).encode())
        try:
            yield file
        finally:
            os.close(file)
