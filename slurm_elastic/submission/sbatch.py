"""The one call of sbatch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.config import ENVIRONMENT_PREFIX

__all__ = ["submit"]

_JOB_ID = re.compile(r"([0-9]+)(;.*)?")


def submit(arguments: Sequence[str] = (), *, script: str | None = None) -> str:
    """Submit a batch script and return the id of the job or array.

    Args:
        arguments: Arguments of sbatch.
        script: Text of the batch script, for sbatch's stdin; None if the arguments name a file.

    Raises:
        UsageError: sbatch refuses the job; the message quotes sbatch.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            text=True,
            env=_environment(os.environ),
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("no sbatch in PATH; submit from a machine of the cluster") from None
    match = _JOB_ID.fullmatch(done.stdout.strip())
    if done.returncode != 0 or match is None:
        said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line]
        raise UsageError(f"sbatch refused the job: {'; '.join(said) or done.stdout.strip() or 'without a message'}")
    return match[1]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of the job that this process runs in: agents would use them."""
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    kept = ("SLURM_CONF", "SLURM_ELASTIC_TEMPLATE")
    prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
    return {
        name: value
        for name, value in environ.items()
        if name in kept or name.startswith(ENVIRONMENT_PREFIX) or not name.startswith(prefixes)
    }
