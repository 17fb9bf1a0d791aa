"""``slurm-elastic verdict``: the exit code of a batch script, and whether its job is requeued."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from slurm_elastic.agent.option_table import Scan, scan
from slurm_elastic.agent.option_values import base_directory, requeue_policy
from slurm_elastic.agent.requeue import requeue_job
from slurm_elastic.cli._command import Verb
from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError
from slurm_elastic.rundir import RunDir, incarnation
from slurm_elastic.slurm import Controller, Shape, SlurmJob

__all__ = ["Verdict"]

_EXAMPLES = """\
  slurm-elastic verdict "$status" "$@"
"""


class Verdict(Verb):
    """Asks the run directory where srun's exit code does not tell, and repeats the root cause of a failure.

    srun returns the highest exit code of its tasks (srun(1), "RETURN VALUE"). A node that was lost or left early makes
    that one of failure, though the others went on and finished the run.

    Requeues the job if it was told to go, see `slurm_elastic.agent.job_end`: at this point no agent is left that would
    be cut short.
    """

    name = "verdict"
    summary = "exit with 0 if the run is finished, else requeue the job if it may go on; for batch scripts"

    def run(self, arguments: Sequence[str]) -> int:
        """Return the exit code of the job."""
        parser = self.parser(examples=_EXAMPLES)
        parser.add_argument("status", type=int, help="exit code of srun")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the agents were given")
        options = parser.parse_args(arguments)
        try:
            return _verdict(options.status, options.arguments)
        except SlurmElasticError as error:
            print(f"slurm-elastic verdict: {error}", file=sys.stderr)
            return int(options.status)


def _verdict(status: int, arguments: Sequence[str]) -> int:
    run_dir, job, found = _run(arguments)
    if run_dir.is_done():
        return ExitCode.FINISHED
    shared = found.value("rdzv_id") is not None or (job is not None and job.shape is Shape.ARRAY)
    scope = incarnation(run_dir.run_id, job.restart_count if job is not None and not shared else 0)
    failure = run_dir.failure(scope)
    if failure is not None and status == ExitCode.FAILED:
        _repeat(failure)
    if job is not None and status != ExitCode.FINISHED:
        # After the requeue Slurm ends this script too, and its exit code says what the agents' does.
        requeue_job(
            run_dir,
            job,
            status,
            controller=Controller(),
            policy=requeue_policy(*(found.value(name) for name in ("max_requeues", "grace", "warning"))),
            failed=failure is not None,
            say=lambda line: print(f"slurm-elastic verdict: {line}", file=sys.stderr, flush=True),
        )
    return status


def _repeat(failure: bytes) -> None:
    """Say the root cause again: srun reported the exit codes of all its tasks after the leader had said it."""
    import msgspec

    from slurm_elastic.agent.root_cause import root_cause
    from slurm_elastic.rendezvous.membership import WorkerFailure

    with contextlib.suppress(msgspec.MsgspecError):
        print(f"root cause: {root_cause(msgspec.json.decode(failure, type=WorkerFailure))}", file=sys.stderr)


def _run(arguments: Sequence[str]) -> tuple[RunDir, SlurmJob | None, Scan]:
    """Name the run directory as the agents do."""
    found = scan(arguments, os.environ)
    job = SlurmJob.from_environment(os.environ)
    run_id = found.value("rdzv_id") or (job.run_id if job else None)
    if run_id is None:
        raise UsageError("there is neither SLURM_JOB_ID nor --run-id; call this from the batch script of a run")
    return RunDir.for_run(base_directory(found.value("run_dir"), job), run_id), job, found
