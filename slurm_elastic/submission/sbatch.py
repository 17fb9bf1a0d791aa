"""The one call of sbatch, and the start of a run as its run directory keeps it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_elastic import typed_json
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import SILENCE, Controller, Reader, agent_settings, drop_foreign

_JOB_ID = re.compile(r"([0-9]+)(;.*)?")


class UnansweredError(UsageError):
    """sbatch has not said whether there is a job now."""


class NoClusterError(UsageError, RuntimeError):
    """There is no sbatch; submitit raises a RuntimeError (submitit/slurm/slurm.py, 1.5.4)."""


def submit(arguments: Sequence[str] = (), *, script: str | None = None, timeout: float | None = None) -> str:
    """Submit a batch script and return the id of the job or array.

    Args:
        arguments: Arguments of sbatch.
        script: Text of the batch script, for sbatch's stdin; None if the arguments name a file.
        timeout: Seconds after which sbatch is killed; None for never.

    Raises:
        UnansweredError: slurmctld has not answered, or sbatch was killed: there may be a job.
        UsageError: sbatch refuses the job; the message quotes sbatch.
    """
    environ = dict(os.environ)
    # sbatch gives the new job its environment, in which agents would take them for their own.
    drop_foreign(environ, Reader.SUBMISSION)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            text=True,
            env=environ,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise UnansweredError(f"sbatch has given no answer within {timeout:g} s") from None
    except FileNotFoundError:
        raise NoClusterError("no sbatch in PATH; submit from a machine of the cluster") from None
    match = _JOB_ID.fullmatch(done.stdout.strip())
    if done.returncode != 0 or match is None:
        said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line]
        error = UnansweredError if done.returncode < 0 or SILENCE.search(done.stderr) else UsageError
        raise error(f"sbatch refused the job: {'; '.join(said) or done.stdout.strip() or 'without a message'}")
    return match[1]


# The start of a run, kept in its run directory: what a further job of the run is made from.
#
# The batch script keeps it, where Slurm's commands are, also if the agents run in an image. Of the environment only
# the settings of the agents are kept: the rest may hold secrets of other programs, and sbatch gives a job that of the
# shell in which it is called.


@dataclass(frozen=True, slots=True)
class Started:
    """The job that has started a run.

    Attributes:
        script: Text of its batch script.
        options: Options of sbatch that Slurm has applied to it, by their long names, also those of the command line.
        arguments: Arguments of the batch script.
        variables: Settings of the agents in its environment, PET_* among them.
    """

    script: str
    options: dict[str, str]
    arguments: tuple[str, ...]
    directory: str
    variables: dict[str, str]


def keep_start(run_dir: RunDir, job: str, arguments: tuple[str, ...], controller: Controller) -> bool:
    """Keep how the run was started, unless that is kept already. Returns False if slurmctld does not answer.

    Args:
        job: The job, as scontrol names it.
        arguments: Arguments of the batch script.
    """
    if run_dir.read_record("command") is not None:
        return True
    script, options = controller.batch_script(job), controller.requested(job)
    if script is None or options is None:
        return not controller.is_silent
    started = Started(script, options, arguments, str(Path.cwd()), agent_settings(os.environ))
    # Its arguments and variables are for its user alone.
    run_dir.claim_record(asdict(started), "command", mode=0o600)
    return True


def read_start(run_dir: RunDir) -> Started | None:
    """Return how the run was started; None if that is not on record."""
    record = run_dir.read_record("command")
    try:
        return None if record is None else typed_json.convert(record, Started)
    except typed_json.JSONError:
        # Of another release.
        return None
