"""The one call of sbatch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import SILENCE, Reader, drop_foreign

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
