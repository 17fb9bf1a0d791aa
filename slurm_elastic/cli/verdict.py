"""``slurm-elastic verdict``: the exit code of a batch script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli.agent_scan import glance
from slurm_elastic.cli.base import Verb
from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError

if TYPE_CHECKING:
    from slurm_elastic.rundir import RunDir

__all__ = ["Verdict"]

_EXAMPLES = """\
  slurm-elastic verdict "$status" "$@"
"""


class Verdict(Verb):
    """Asks the run directory where srun's exit code does not tell.

    srun returns the highest exit code of its tasks (srun(1), "RETURN VALUE"). A node that was lost or left early makes
    that one of failure, though the others went on and finished the run.
    """

    name = "verdict"
    summary = "exit with 0 if the run is finished, else with the exit code given; for batch scripts"

    def run(self, arguments: Sequence[str]) -> int:
        """Return the exit code of the job."""
        parser = self.parser(examples=_EXAMPLES)
        parser.add_argument("status", type=int, help="exit code of srun")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the agents were given")
        options = parser.parse_args(arguments)
        try:
            done = _run_dir(options.arguments).is_done()
        except SlurmElasticError as error:
            print(f"slurm-elastic verdict: {error}", file=sys.stderr)
            done = False
        return ExitCode.FINISHED if done else options.status


def _run_dir(arguments: Sequence[str]) -> RunDir:
    """Name the run directory as the agents do."""
    from slurm_elastic.agent.location import base_directory
    from slurm_elastic.rundir import RunDir
    from slurm_elastic.slurm import SlurmJob

    seen = glance(arguments, os.environ)
    job = SlurmJob.from_environment(os.environ)
    run_id = seen.run_id or (job.run_id if job else None)
    if run_id is None:
        raise UsageError("there is neither SLURM_JOB_ID nor --run-id; call this from the batch script of a run")
    return RunDir.for_run(base_directory(seen.run_dir, job), run_id)
