"""``slurm-elastic job-end``, formerly ``verdict``: the exit code of a batch script, and the requeue of its job."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.agent.job.requeue import read_history, requeue_job
from slurm_elastic.agent.option_table import Scan, scan
from slurm_elastic.agent.option_values import OptionValues, base_directory, named_run, read_options
from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError
from slurm_elastic.failures.history import find_loops
from slurm_elastic.rundir import JobRecords, RunContents, RunDir, failure_of, run_start, runs_of_job
from slurm_elastic.slurm import Controller, Reader, SlurmJob, drop_foreign
from slurm_elastic.submission.sbatch import keep_start
from slurm_elastic.text import printable

_OF_REQUEUES = ("max_requeues", "max_excluded", "grace", "warning")
"""The options that count here; the agents have refused what is wrong with the others."""
_LOOK, _DELAY = 2.0, 4.0
"""Seconds between two looks whether the run is over, and for srun to tell it first."""


class JobEnd(Command):
    """Decides the exit code of a batch script after its agents have ended, and requeues the job if it has to go on.

    srun returns the highest exit code of its tasks (srun(1), "RETURN VALUE"). A node that was lost or left early turns
    that into a failure although the other nodes finished the run; the run directory has the truth. At this moment no
    agent is left whose shutdown a requeue would cut short, see `slurm_elastic.agent.job.job_end`.
    """

    name = "job-end"
    summary = "exit with 0 if the run is finished, otherwise requeue the job if it can go on; for batch scripts"
    examples = """\
  slurm-elastic job-end "$status" "$@"
"""

    def add_options(self, parser: Parser) -> None:
        parser.add_argument(
            "status",
            help="exit code of srun; wait: print it when the run is over and this job has no agent any more",
        )
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the agents")

    def run(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        drop_foreign(os.environ, Reader.BATCH)
        if options.status == "wait":
            return _wait(options.arguments)
        if not options.status.lstrip("-").isdecimal():
            see = f"see slurm-elastic {self.name} --help"
            raise UsageError(f"the status {options.status!r} is neither an exit code nor wait; {see}")
        status = int(options.status)
        try:
            return _job_end(status, options.arguments)
        except SlurmElasticError as error:
            _print(str(error))
            return status


def _wait(arguments: Sequence[str]) -> int:
    """Print the exit code of a run that is over, when no agent runs in this job and srun has had time to see that.

    The batch script starts this beside srun, and ends it with srun.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent, kept = os.getppid(), False
    while os.getppid() == parent:
        time.sleep(_LOOK)
        # Records that cannot be read now may be later; meanwhile srun tells the end.
        with contextlib.suppress(SlurmElasticError, OSError):
            kept = kept or _keep_start(arguments)
        with contextlib.suppress(SlurmElasticError):
            if code_when_over(arguments) is None:
                continue
            time.sleep(_DELAY)
            if os.getppid() == parent and (code := code_when_over(arguments)) is not None:
                _print("the run is over and has no agent in this job any more, but srun does not know that: it ends")
                print(int(code), flush=True)
                break
    return ExitCode.FINISHED


def _keep_start(arguments: Sequence[str]) -> bool:
    """Keep how the run was started, for further jobs of it. Returns False if that has to be tried again."""
    job, runs, _ = _runs_of_this_start(scan(arguments, os.environ))
    # Of several runs of a job the batch script does not say which one it starts.
    if job is None or len(runs) > 1:
        return True
    return run_start(runs[0]) is not None and keep_start(runs[0], job.name, tuple(arguments), Controller())


def code_when_over(arguments: Sequence[str]) -> ExitCode | None:
    """Return the exit code of the job if its runs are over and it has no agent any more."""
    job, runs, restarts = _runs_of_this_start(scan(arguments, os.environ))
    if job is None:
        return None
    from slurm_elastic.observe.records import read_records
    from slurm_elastic.observe.status import agents_of

    code = ExitCode.FINISHED
    for run_dir in runs:
        if not run_dir.is_done():
            if failure_of(run_dir, restarts) is None:
                return None
            code = ExitCode.FAILED
        agents = agents_of(read_records(run_dir), job.job_id, job.restart_count)
        if not agents or any(agent.alive for agent in agents):
            return None
    return code


def _runs_of_this_start(options: Scan) -> tuple[SlurmJob | None, list[RunDir], int | None]:
    """Return the job, its runs, and the restart count as for `incarnation_of`.

    Where no agent has begun a run, it is that of the job's number.
    """
    job = SlurmJob.from_environment(os.environ)
    named, base = named_run(options.value("rdzv_id"), job, os.environ), base_directory(options.value("run_dir"), job)
    if named is not None:
        return job, [RunDir.for_run(base, named)], None
    if job is None:
        raise UsageError("neither SLURM_JOB_ID nor --run-id is given; call this from the batch script of a run")
    begun = [run_dir for run_dir in runs_of_job(base, job.name) if run_start(run_dir, job.restart_count) is not None]
    return job, begun or [RunDir.for_run(base, job.run_id)], job.restart_count


def _job_end(status: int, arguments: Sequence[str]) -> int:
    options = scan(arguments, os.environ)
    job, runs, restarts = _runs_of_this_start(options)
    if job is not None:
        for run_dir in runs:
            # Agents that were killed have left theirs, and their ports may be another user's soon.
            with contextlib.suppress(SlurmElasticError):
                run_dir.withdraw_health_of_job(job.job_id)
    going_on = [run_dir for run_dir in runs if not run_dir.is_done()]
    if not going_on and (job is None or status != ExitCode.USAGE or job.job_id in RunContents(runs[0]).jobs()):
        if status != ExitCode.FINISHED:
            _print(f"run {runs[0].run_id} is finished; what srun says above is of agents that were lost or left")
        return ExitCode.FINISHED
    if (
        "SLURM_ELASTIC_BATCH_VERSION" in os.environ
        and status not in list(ExitCode)
        and not any(run_dir.path.is_dir() for run_dir in runs)
    ):
        _print(
            f"no agent has started, srun ended with {status}; install slurm_elastic {__version__} in the image of the "
            "agents"
        )
        return status
    values = read_options(lambda name: options.value(name) if name in _OF_REQUEUES else None)
    for run_dir in going_on:
        failure = failure_of(run_dir, restarts)
        own = status if len(runs) == 1 or job is None else _status_of(run_dir, job, status, failed=failure is not None)
        if _end_run(run_dir, job, own, failure, values):
            return own
        status = max(status, own)
    return status


def _status_of(run_dir: RunDir, job: SlurmJob, status: int, *, failed: bool) -> int:
    """Return the exit code of one of several runs; `status` is that of any of them, and 0 after bash's ``wait``."""
    if failed:
        return ExitCode.FAILED
    return ExitCode.LEFT if JobRecords(run_dir, job.job_id).notice(job.restart_count) else status or ExitCode.FAILED


def _end_run(run_dir: RunDir, job: SlurmJob | None, status: int, failure: object, values: OptionValues) -> bool:
    """Explain the end of a run that is not finished. Returns True if its job starts again."""
    history: list[tuple[float, dict[str, Any]]] = []
    with contextlib.suppress(SlurmElasticError):
        history = read_history(run_dir)
    if failure is not None and status == ExitCode.FAILED:
        ends = [(when, event.get("node")) for when, event in history if event.get("event") == "run_ended"]
        if job is not None and ends and max(ends)[1] in job.job_nodes:
            name = run_dir.run_id
            _print(f"run {name} has failed, its root cause is above; more: slurm-elastic logs {name} --errors")
        else:
            _print_root_cause(failure)
    if status == ExitCode.FINISHED:
        return False
    for loop in find_loops(history, time.time()):
        _print(f"{printable(loop.text)}; {printable(loop.advice)}")
    if job is None:
        return False
    # The requeue makes Slurm end this script, too; its exit code is that of the agents. SIGTERM comes first, and the
    # nodes that the job excludes can be set only after the requeue.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return requeue_job(
            run_dir, job, status, controller=Controller(), values=values, failed=failure is not None, say=_print
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(line: str) -> None:
    print(f"slurm-elastic job-end: {line}", file=sys.stderr, flush=True)


def _print_root_cause(failure: object) -> None:
    """Print the root cause: the leader, which is not of this job, has done so in another output."""
    from slurm_elastic import typed_json
    from slurm_elastic.agent.root_cause import root_cause
    from slurm_elastic.rendezvous.membership.agents import WorkerFailure

    with contextlib.suppress(typed_json.JSONError):
        print(f"root cause: {root_cause(typed_json.convert(failure, WorkerFailure))}", file=sys.stderr)
