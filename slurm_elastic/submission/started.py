"""The start of a run, kept in its run directory: what a further job of the run is made from.

The batch script keeps it, where Slurm's commands are, also if the agents run in an image. Of the environment only the
settings of the agents are kept: the rest may hold secrets of other programs, and sbatch gives a job that of the shell
in which it is called.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_elastic import typed_json
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller, agent_settings

_MOST_BYTES = 16 << 20
"""A program of more bytes is not compared."""


@dataclass(frozen=True, slots=True)
class Started:
    """The job that has started a run.

    Attributes:
        script: Text of its batch script.
        options: Options of sbatch that Slurm has applied to it, by their long names, also those of the command line.
        arguments: Arguments of the batch script.
        directory: Its working directory.
        variables: Settings of the agents in its environment, PET_* among them.
        program: What the workers run; empty for a module.
        digest: SHA-256 of the program's file; empty if there is none that could be read.
    """

    script: str
    options: dict[str, str]
    arguments: tuple[str, ...]
    directory: str
    variables: dict[str, str]
    program: str = ""
    digest: str = ""

    def has_changed(self) -> bool:
        """Return True if the program is another one now."""
        now = _digest(Path(self.directory, self.program))
        return bool(self.digest and now) and now != self.digest


def keep_start(run_dir: RunDir, job: str, arguments: tuple[str, ...], program: str, controller: Controller) -> bool:
    """Keep how the run was started, unless that is kept already. Returns False if slurmctld does not answer.

    Args:
        run_dir: The run directory.
        job: The job, as scontrol names it.
        arguments: Arguments of the batch script.
        program: What the workers run.
        controller: Slurm's controller.
    """
    if run_dir.command() is not None:
        return True
    script, options = controller.batch_script(job), controller.requested(job)
    if script is None or options is None:
        return not controller.is_silent
    started = Started(
        script, options, arguments, str(Path.cwd()), agent_settings(os.environ), program, _digest(Path(program))
    )
    run_dir.claim_command(json.dumps(asdict(started)).encode())
    return True


def read_start(run_dir: RunDir) -> Started | None:
    """Return how the run was started; None if that is not on record."""
    content = run_dir.command()
    try:
        return None if content is None else typed_json.decode(content, Started)
    except typed_json.JSONError:
        # Of another release.
        return None


def _digest(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
