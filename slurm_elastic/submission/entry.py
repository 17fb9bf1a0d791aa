"""What the workers of a submission run: a function by way of its pickle, or a script as torchrun starts it."""

from __future__ import annotations

import argparse
import json
import runpy
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core import utils

from slurm_elastic.agent.script_check import require_entry_point
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import publish_file, read_file

__all__ = ["WORKER_MODULE", "Script", "job_id_of", "read_ranks", "write_ranks"]

WORKER_MODULE = "slurm_elastic.submission.worker"
"""What `python -m` runs in the workers of a function, with the job's folder and the pickle's first name."""


def job_id_of(run_id: str) -> str:
    """The id of the job that a run belongs to. On one machine it is a process id, to which the run's id adds a word."""
    return run_id.partition("-")[0]


def write_ranks(paths: utils.JobPaths, world_size: int) -> None:
    """Say of how many ranks there are results."""
    publish_file(_ranks(paths), json.dumps({"world_size": world_size}).encode())


def read_ranks(paths: utils.JobPaths) -> int | None:
    """Return what `write_ranks` said; None if it did not."""
    content = read_file(_ranks(paths))
    return None if content is None else int(json.loads(content)["world_size"])


def _ranks(paths: utils.JobPaths) -> Path:
    return Path(paths.folder) / f"{paths.job_id}_ranks.json"


@dataclass(frozen=True, slots=True)
class Script:
    """A training script and its arguments. Called, it runs in this process."""

    path: str
    arguments: tuple[str, ...] = ()

    def require_there(self) -> None:
        """Look for it here, from where the nodes will see it too if it lies on a shared disk.

        Raises:
            UsageError: it is not there or cannot be read, or an argument is no text.
        """
        for argument in self.arguments:
            if not isinstance(argument, str):
                raise UsageError(f"argument {argument!r} of {self.path} is no text; give strings, as on a command line")
        options = argparse.Namespace(module=False, no_python=False, run_path=False, training_script=self.path)
        require_entry_point(options, socket.gethostname())

    def words(self) -> tuple[str, ...]:
        """Script and arguments on the agent's command line."""
        return (self.path, *self.arguments)

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.write_text(json.dumps({"path": self.path, "arguments": self.arguments}))

    @classmethod
    def read(cls, path: Path) -> Script:
        """Return what `write` kept."""
        content: dict[str, Any] = json.loads(path.read_text())
        return cls(content["path"], tuple(content["arguments"]))

    def __call__(self) -> None:
        """Run it in this process, as `python train.py` would."""
        before = sys.argv, sys.path[:]
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"{self.path} ended with {end.code}") from end
        finally:
            sys.argv, sys.path[:] = before
