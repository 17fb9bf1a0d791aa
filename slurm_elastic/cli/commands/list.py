"""``slurm-elastic list``: shows the runs of a directory, or of all queued jobs of this user."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Queue, Terminal, ViewCommand, ago, job_facts, present_status, table
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.find import own_run_dirs
from slurm_elastic.observe.status import status_json
from slurm_elastic.observe.views import GOES_ON, RunStatus
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.slurm import Controller, QueuedJob

_EXAMPLES = """\
  slurm-elastic list                 runs whose jobs were submitted in this directory
  slurm-elastic list --queued        runs of all queued jobs, wherever they were submitted
"""


class List(ViewCommand):
    """Shows one line for each run."""

    name = "list"
    summary = "show the runs of this directory, or of all queued jobs"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")
        parser.add_argument("--queued", action="store_true", help="the runs of all queued jobs, as squeue lists them")
        parser.add_argument("--json", action="store_true", help="a list of what `status --json` prints")

    def show(self, arguments: Sequence[str]) -> int:
        """Print a table of runs."""
        options = self.parser().parse_args(arguments)
        if options.queued and options.run_dir:
            raise UsageError("--queued finds the directories itself; give either --queued or --run-dir")
        queue = Queue()
        bases = [Path(options.run_dir or Path.cwd())]
        if options.queued:
            bases = [Path(name) for name in dict.fromkeys(job.work_dir for job in _answer(queue))]
        run_dirs = [run_dir for base in bases for run_dir in own_run_dirs(base)]
        run_dirs += _not_begun(queue, run_dirs, bases)
        statuses = [present_status(run_dir, queue) for run_dir in run_dirs]
        if options.queued:
            statuses = [status for status in statuses if status.state in GOES_ON]
        statuses.sort(key=lambda status: status.updated or 0.0)
        if options.json:
            print(json.dumps([status_json(status) for status in statuses], indent=1))
            return 0
        if not statuses:
            print("no runs of queued jobs" if options.queued else f"no runs in {bases[0].absolute()}")
            return 0
        terminal, now = Terminal(), time.time()
        rows = [("RUN", "ROUND", "NODES", "WORKERS", "STEP", "CHANGED")]
        rows += [
            (
                status.run,
                "" if status.round is None else str(status.round),
                str(status.nodes) if status.nodes else "",
                str(status.world_size) if status.world_size else "",
                "" if status.step is None else str(status.step),
                "; ".join(filter(None, _changed(status, now))),
            )
            for status in statuses
        ]
        states = ["STATE".ljust(8), *(terminal.state(status.state, 8) for status in statuses)]
        for state, line in zip(states, table(rows), strict=True):
            terminal.write(f"{state}  {line}")
        return 0


def _changed(status: RunStatus, now: float) -> list[str]:
    if not status.updated:
        return job_facts(status.jobs or (), now)
    return [f"{ago(now - status.updated)} ago", status.holds]


def _not_begun(queue: Queue, begun: Sequence[RunDir], bases: Sequence[Path]) -> list[RunDir]:
    """Return the runs, without a directory yet, of jobs in the queue that were submitted in these directories."""
    places = {base.absolute() for base in bases}
    waiting: dict[Path, RunDir] = {}
    for job in queue.jobs or ():
        base, run_id = Path(job.work_dir), job.array_job_id if "[" in job.name else job.name
        # A component of a heterogeneous job is no run.
        mine = re.compile(rf"{re.escape(run_id)}(\.[0-9]+)?")
        if (
            base not in places
            or not re.fullmatch("[0-9_]+", run_id)
            or any(mine.fullmatch(run.run_id) for run in begun)
        ):
            continue
        there = (run for run in begun if run.path.parent.parent == base)
        if any(RunContents(run).has_job(job.job_id) for run in there):
            continue
        script = Controller().batch_script(job.array_job_id if "[" in job.name else job.name)
        if script is not None and re.search("slurm.elastic", script):
            run_dir = RunDir.for_run(base, run_id)
            waiting[run_dir.path] = run_dir
    return list(waiting.values())


def _answer(queue: Queue) -> tuple[QueuedJob, ...]:
    if queue.jobs is None:
        raise UsageError("squeue gives no answer on this machine; leave out --queued, or run it on a login node")
    return queue.jobs
