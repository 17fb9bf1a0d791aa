"""``slurm-elastic verdict``: the exit code of a batch script."""

from __future__ import annotations

import argparse
import contextlib
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
    """Asks the run directory where srun's exit code does not tell, and repeats the root cause of a failure.

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
            run_dir, scope = _run(options.arguments)
            if run_dir.is_done():
                return ExitCode.FINISHED
            failure = run_dir.failure(scope) if options.status == ExitCode.FAILED else None
        except SlurmElasticError as error:
            print(f"slurm-elastic verdict: {error}", file=sys.stderr)
            return int(options.status)
        if failure is not None:
            _repeat(failure)
        return int(options.status)


def _repeat(failure: bytes) -> None:
    """Say the root cause again: srun reported the exit codes of all its tasks after the leader had said it."""
    import msgspec

    from slurm_elastic.agent.root_cause import root_cause
    from slurm_elastic.rendezvous.membership import WorkerFailure

    with contextlib.suppress(msgspec.MsgspecError):
        print(f"root cause: {root_cause(msgspec.json.decode(failure, type=WorkerFailure))}", file=sys.stderr)


def _run(arguments: Sequence[str]) -> tuple[RunDir, str]:
    """Name the run directory, and this incarnation in it, as the agents do."""
    from slurm_elastic.agent.location import base_directory
    from slurm_elastic.rundir import RunDir, incarnation
    from slurm_elastic.slurm import SlurmJob

    seen = glance(arguments, os.environ)
    job = SlurmJob.from_environment(os.environ)
    run_id = seen.run_id or (job.run_id if job else None)
    if run_id is None:
        raise UsageError("there is neither SLURM_JOB_ID nor --run-id; call this from the batch script of a run")
    run_dir = RunDir.for_run(base_directory(seen.run_dir, job), run_id)
    return run_dir, incarnation(run_id, job.restart_count if job else 0)
