"""``slurm-elastic status`` and ``list``: show what a run, or each of several, does now, or why it stopped."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Queue, ViewCommand, add_run, open_run, present_status, problems_to_stderr
from slurm_elastic.cli._terminal import BOLD, FAINT, RED, ago, clock, rank_list, state_text, styled, table
from slurm_elastic.errors import UsageError
from slurm_elastic.failures.causes import explanation
from slurm_elastic.observe.find import own_run_dirs
from slurm_elastic.observe.status import status_json
from slurm_elastic.observe.views import GOES_ON, TRAINS, AgentView, LiveWorker, RunStatus
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.slurm import Controller, compress
from slurm_elastic.text import printable, size_text

_Number = TypeVar("_Number", int, float)
_PROCESS = {"D": "waits for a disk or a file system", "T": "is stopped by a signal", "Z": "has ended"}
"""States of processes that are worth a word (proc_pid_stat(5))."""


class Status(ViewCommand):
    """Shows the state of a run: what its agents do now, its records, and what Slurm says."""

    name = "status"
    summary = "show what a run does now, or why it stopped"
    examples = """\
  slurm-elastic status 1234
  slurm-elastic status 1234 --workers
  slurm-elastic status 1234 --json
  until slurm-elastic status 1234 >/dev/null; [ $? -lt 3 ]; do sleep 60; done

exit codes: 0 finished, 1 failed, 2 wrong usage, 3 running, 4 waiting for nodes or in the queue, 5 stopped: no agent
runs and no job waits
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser, or_newest=True)
        parser.add_argument("--workers", action="store_true", help="a line for each worker, with what it does now")
        parser.add_argument("--json", action="store_true", help="JSON, with the schema in docs/events.md")

    def show(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        queue = Queue()
        try:
            status = present_status(open_run(options.run_dir, options.run_id, queue), queue, live=True)
        except UsageError:
            raise
        except Exception as error:
            # Exit code 1 would say that the run has failed.
            raise UsageError(f"the state of the run cannot be read: {error or type(error).__name__}") from error
        if options.json:
            print(json.dumps(status_json(status), indent=1))
        else:
            problems_to_stderr(status.problems)
            _show(status, time.time(), options.workers)
        return status.state.exit_code


def _show(status: RunStatus, now: float, each_worker: bool) -> None:
    since = f", last change {ago(now - status.updated)} ago" if status.updated else ""
    print(f"run {styled(status.run, BOLD)}: {state_text(status.state)}{since}")
    tables: list[Sequence[Sequence[str]]] = [list(facts(status, now))]
    if status.agents:
        tables.append(_titled(_nodes(status, now)))
    if each_worker:
        titles = ("RANK", "NODE", "PID", "DOES", "STEP", "STEPS/S", "SAVED", "BUSY", "SCORE")
        tables.append([titles, *_workers(status)])
    for index, rows in enumerate(tables):
        if index:
            print()
        for line in table(rows):
            print(f"  {line}")
    cause = status.root_cause
    if cause is not None:
        why = explanation(cause.cause)
        print()
        rank = "" if cause.rank is None else f"rank {cause.rank} on "
        name = styled("root cause" if status.state.value == "failed" else "last failure", BOLD)
        print(f"{name}: {rank}{cause.node}{f': {why}' if why else ''}")
        for line in cause.text.splitlines()[-20:]:
            print(f"  {styled(printable(line), RED)}")
        if cause.log:
            print(f"  the rest: {printable(cause.log, 4096)}")
    if status.events:
        print()
        for event in status.events:
            print(f"  {styled(clock(event.time, now), FAINT)}  {printable(event.text)}")


def _titled(rows: Iterable[Mapping[str, str]]) -> list[list[str]]:
    """Return rows by the titles of their columns, which all have, as a table with its titles; there is a row."""
    cells = list(rows)
    return [list(cells[0]), *(list(row.values()) for row in cells)]


def facts(status: RunStatus, now: float) -> Iterable[tuple[str, str]]:
    """Yield what is known of a run, each fact with its name."""
    if status.command:
        yield "command", printable(shlex.join(status.command), 200)
    if status.round is not None:
        now_ = f": {status.nodes} nodes, {status.world_size} workers" if status.nodes else ""
        yield "round", f"{status.round} after {status.reason.replace('_', ' ')}{now_}"
    if status.step is not None:
        speed = f", {status.steps_per_second:g} a second" if status.steps_per_second else ""
        yield "step", f"{status.step}{speed}"
    elif status.steps_per_second:
        yield "steps", f"{status.steps_per_second:g} a second"
    if status.loss is not None:
        yield "loss", f"{status.loss:g} at step {status.loss_step}"
    if status.checkpoint is not None:
        yield "checkpoint", f"step {status.checkpoint}"
    safe = [agent.live.safe_step for agent in status.agents if agent.live is not None]
    if (newest := max((step for step in safe if step is not None), default=None)) is not None:
        yield "snapshots", f"step {newest} is safe on other nodes"
    used, remaining = f"{status.restarts} used", status.restarts_left
    words: dict[int | None, str] = {None: used, 0: "the next failure of a worker ends the run"}
    yield "restarts", words.get(remaining, f"{used}, {remaining} left")
    if (jobs := status.replacing) is not None:
        yield "replaces", f"lost nodes, after {jobs.after:g} s; {jobs.submitted} of at most {jobs.limit} jobs submitted"
    if status.leader:
        yield "leader", f"{status.leader}{' (does not answer)' if status.leader_answers is False else ''}"
    for slow in status.slow:
        yield "slow", f"since {clock(slow.since, now)}: {printable(slow.text)}"
    for loop in status.loops:
        yield "loop", f"{printable(loop.text)}; {printable(loop.advice)}"
    if status.live is not None:
        answer = status.live.answer
        silent = f"; no answer from {answer.silent}" if answer.silent else ""
        yield "live", f"{answer.answered} of {answer.asked} agents have answered in {status.live.seconds:.2f} s{silent}"
        if answer.phase == "forming":
            yield "forming", f"the next round, since {ago(answer.seconds)}; it needs {answer.min_nodes} nodes"
    for notice in status.notices:
        left = "" if notice.seconds is None else f"; {notice.seconds:.0f} s left"
        node = f"{notice.node}, " if notice.node else ""
        yield "notice", f"{node}job {notice.job}: {printable(notice.text)}{left}"
    if status.holds:
        yield "holds", status.holds
    for fact in _job_facts(status, now):
        yield "job", fact


def _job_facts(status: RunStatus, now: float) -> list[str]:
    """Return a line for each job in the queue: its state, why it waits, and when Slurm means to start it."""
    return [
        f"{job.job} {job.state.lower()}"
        + (f" ({job.reason})" if job.reason else "")
        + (f", expected to start at {clock(job.start, now)}" if job.start else "")
        for job in status.jobs or ()
    ]


def _nodes(status: RunStatus, now: float) -> Iterable[dict[str, str]]:
    """Yield a row for all nodes that do the same, by the titles of its columns."""
    has_snapshots = any(agent.live is not None and agent.live.snapshot_bytes for agent in status.agents)
    groups: dict[tuple[str, str, int | None, str], list[AgentView]] = {}
    for agent in status.agents:
        ended = "" if agent.exit_code is None else f" ({agent.exit_code})"
        domain = agent.domain if status.has_domains else ""
        groups.setdefault((domain, f"{agent.state}{ended}", agent.round, agent.job), []).append(agent)
    for (domain, state, round_, job), members in groups.items():
        row = {"NODES": compress(dict.fromkeys(agent.node for agent in members))}
        if status.has_domains:
            row["DOMAIN"] = printable(domain)
        ranks = sorted(rank for agent in members for rank in agent.ranks)
        row |= {"STATE": state, "ROUND": _number(round_), "RANKS": rank_list(ranks) if state in TRAINS else ""}
        if status.live is not None:
            workers = [worker for agent in members for worker in agent.answers]
            row["STEP"] = _span(worker.step for worker in workers)
            row["STEPS/S"] = _span(worker.steps_per_second for worker in workers)
            row["SAVED"] = _span(worker.checkpoint for worker in workers)
        if has_snapshots:
            sizes = (agent.live.snapshot_bytes for agent in members if agent.live is not None)
            row["SNAPSHOTS"] = _span(sizes, size_text, " to ")
        yield {**row, "JOB": job, "SINCE": ago(now - min(agent.since for agent in members))}


def _workers(status: RunStatus) -> Iterable[tuple[str, ...]]:
    workers = [(worker, agent.node) for agent in status.agents for worker in agent.answers]
    scores = {score.rank: score for score in status.scores}
    for worker, node in sorted(workers, key=lambda pair: pair[0].rank):
        score = scores.get(worker.rank)
        compared = (None, None) if score is None else (score.busy_seconds, score.relative_score)
        numbers = (worker.step, worker.steps_per_second, worker.checkpoint, *compared)
        yield str(worker.rank), node, _number(worker.pid), _does(worker), *(_number(number) for number in numbers)


def _does(worker: LiveWorker) -> str:
    state = {
        "starting": "before its first step",
        "stepping": "in a step" if worker.step_seconds is None else f"in a step for {worker.step_seconds:.1f} s",
        "stopped": "has stopped at the agreed step",
        "unknown": "runs; its script reports no steps",
    }.get(worker.state, worker.state)
    process = _PROCESS.get(worker.process)
    return printable(f"{state}; {process}" if process else state)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _span(values: Iterable[_Number | None], text: Callable[[_Number], str] = _number, between: str = "-") -> str:
    """Return the least and the greatest of the values that are known, or the one that is both."""
    numbers = [value for value in values if value is not None]
    return between.join(dict.fromkeys(text(end(numbers)) for end in (min, max))) if numbers else ""


class List(ViewCommand):
    """Shows one line for each run."""

    name = "list"
    summary = "show the runs of this directory, or of all queued jobs"
    examples = """\
  slurm-elastic list                 runs whose jobs were submitted in this directory
  slurm-elastic list --queued        runs of all queued jobs, wherever they were submitted
"""

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")
        parser.add_argument("--queued", action="store_true", help="the runs of all queued jobs, as squeue lists them")
        parser.add_argument("--json", action="store_true", help="a list of what `status --json` prints")

    def show(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        if options.queued and options.run_dir:
            raise UsageError("--queued finds the directories itself; give either --queued or --run-dir")
        queue = Queue()
        bases = [Path(options.run_dir or Path.cwd())]
        if options.queued and queue.jobs is None:
            raise UsageError("squeue gives no answer on this machine; leave out --queued, or run it on a login node")
        if options.queued:
            bases = [Path(name) for name in dict.fromkeys(job.work_dir for job in queue.jobs or ())]
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
        now = time.time()
        rows = _titled(
            {
                "RUN": status.run,
                "ROUND": _number(status.round),
                "NODES": _number(status.nodes or None),
                "WORKERS": _number(status.world_size or None),
                "STEP": _number(status.step),
                "CHANGED": "; ".join(filter(None, _changed(status, now))),
            }
            for status in statuses
        )
        states = ["STATE".ljust(8), *(state_text(status.state, 8) for status in statuses)]
        for state, line in zip(states, table(rows), strict=True):
            print(f"{state}  {line}")
        return 0


def _changed(status: RunStatus, now: float) -> list[str]:
    if not status.updated:
        return _job_facts(status, now)
    return [f"{ago(now - status.updated)} ago", status.holds]


def _not_begun(queue: Queue, begun: Sequence[RunDir], bases: Sequence[Path]) -> list[RunDir]:
    """Return the runs, without a directory yet, of jobs in the queue that were submitted in these directories."""
    places = {base.absolute() for base in bases}
    waiting: dict[RunDir, None] = {}
    for job in queue.jobs or ():
        base, name = Path(job.work_dir), job.array_job_id if "[" in job.name else job.name
        # A component of a heterogeneous job is no run.
        if base not in places or not re.fullmatch("[0-9_]+", name):
            continue
        mine = re.compile(rf"{re.escape(name)}(\.[0-9]+)?")
        there = (run for run in begun if run.path.parent.parent == base)
        if any(mine.fullmatch(run.run_id) for run in begun) or any(job.job_id in RunContents(r).jobs() for r in there):
            continue
        script = Controller().batch_script(name)
        if script is not None and re.search("slurm.elastic", script):
            waiting[RunDir.for_run(base, name)] = None
    return list(waiting)
