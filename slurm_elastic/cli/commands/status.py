"""``slurm-elastic status``: shows what a run does now, or why it stopped."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import (
    Queue,
    Terminal,
    ViewCommand,
    add_run,
    ago,
    clock,
    job_facts,
    open_run,
    present_status,
    problems_to_stderr,
    rank_list,
    table,
)
from slurm_elastic.errors import UsageError
from slurm_elastic.failures.causes import explanation
from slurm_elastic.observe.pace import SlowRankView
from slurm_elastic.observe.status import status_json
from slurm_elastic.observe.views import AgentView, RunStatus, StatusExit
from slurm_elastic.slurm import compress
from slurm_elastic.text import printable, size_text

if TYPE_CHECKING:
    from slurm_elastic.observe.live import LiveWorker


_EXAMPLES = """\
  slurm-elastic status 1234
  slurm-elastic status 1234 --workers
  slurm-elastic status 1234 --json
  until slurm-elastic status 1234 >/dev/null; [ $? -lt 3 ]; do sleep 60; done

exit codes: 0 finished, 1 failed, 2 wrong usage, 3 running, 4 waiting for nodes or in the queue, 5 stopped: no agent
runs and no job waits
"""


_PROCESS = {"D": "waits for a disk or a file system", "T": "is stopped by a signal", "Z": "has ended"}
"""States of processes that are worth a word (proc_pid_stat(5))."""


class Status(ViewCommand):
    """Shows the state of a run: what its agents do now, its records, and what Slurm says."""

    name = "status"
    summary = "show what a run does now, or why it stopped"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_run(parser, or_newest=True)
        parser.add_argument("--workers", action="store_true", help="a line for each worker, with what it does now")
        parser.add_argument("--json", action="store_true", help="JSON, with the schema in docs/events.md")

    def show(self, arguments: Sequence[str]) -> int:
        """Print the state of the run; the exit code says it, too."""
        options = self.parser().parse_args(arguments)
        queue = Queue()
        try:
            status = present_status(open_run(options, queue), queue, live=True)
        except UsageError:
            raise
        except Exception as error:
            # Exit code 1 would say that the run has failed.
            raise UsageError(f"the state of the run cannot be read: {error or type(error).__name__}") from error
        if options.json:
            print(json.dumps(status_json(status), indent=1))
        else:
            problems_to_stderr(status.problems)
            _show(status, Terminal(), time.time(), options.workers)
        return StatusExit[status.state.name]


def _show(status: RunStatus, terminal: Terminal, now: float, each_worker: bool) -> None:
    write = terminal.write
    state = terminal.state(status.state)
    since = f", last change {ago(now - status.updated)} ago" if status.updated else ""
    write(f"run {terminal.bold(status.run)}: {state}{since}")
    rows = list(_facts(status, now))
    for line in table(rows):
        write(f"  {line}")
    if status.agents:
        write()
        steps = ("STEP", "STEPS/S", "SAVED") if status.live is not None else ()
        snapshots = ("SNAPSHOTS",) if _has_snapshots(status) else ()
        domain = ("DOMAIN",) if status.has_domains else ()
        titles = ("NODES", *domain, "STATE", "ROUND", "RANKS", *steps, *snapshots, "JOB", "SINCE")
        for line in table([titles, *_nodes(status, now)]):
            write(f"  {line}")
    if each_worker:
        write()
        for line in table(
            [("RANK", "NODE", "PID", "DOES", "STEP", "STEPS/S", "SAVED", "BUSY", "SCORE"), *_workers(status)]
        ):
            write(f"  {line}")
    cause = status.root_cause
    if cause is not None:
        why = explanation(cause.cause)
        write()
        rank = "" if cause.rank is None else f"rank {cause.rank} on "
        name = terminal.bold("root cause" if status.state.value == "failed" else "last failure")
        write(f"{name}: {rank}{cause.node}{f': {why}' if why else ''}")
        for line in cause.text.splitlines()[-20:]:
            write(f"  {terminal.red(printable(line))}")
        if cause.log:
            write(f"  the rest: {printable(cause.log, 4096)}")
    if status.events:
        write()
        for event in status.events:
            write(f"  {terminal.faint(clock(event.time, now))}  {printable(event.text)}")


def _facts(status: RunStatus, now: float) -> Iterable[tuple[str, str]]:
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
        answer = {None: "", True: "", False: " (does not answer)"}[status.leader_answers]
        yield "leader", f"{status.leader}{answer}"
    for slow in status.slow:
        yield "slow", f"rank {slow.rank} on {slow.node} since {clock(slow.since, now)}: {_slow(slow, status)}"
    for loop in status.loops:
        yield "loop", f"{printable(loop.text)}; {printable(loop.advice)}"
    live = status.live
    if live is not None:
        silent = f"; no answer from {live.silent}" if live.silent else ""
        yield "live", f"{live.answered} of {live.asked} agents have answered in {live.seconds:.2f} s{silent}"
        if live.phase == "forming":
            yield "forming", f"the next round, since {ago(live.phase_seconds)}; it needs {live.min_nodes} nodes"
    for notice in status.notices:
        left = "" if notice.seconds is None else f"; {notice.seconds:.0f} s left"
        node = f"{notice.node}, " if notice.node else ""
        yield "notice", f"{node}job {notice.job}: {printable(notice.text)}{left}"
    if status.holds:
        yield "holds", status.holds
    for fact in job_facts(status.jobs or (), now):
        yield "job", fact


def _nodes(status: RunStatus, now: float) -> Iterable[tuple[str, ...]]:
    """Yield a row for all nodes that do the same."""
    groups: dict[tuple[str, str, int | None, str], list[AgentView]] = {}
    for agent in status.agents:
        ended = "" if agent.exit_code is None else f" ({agent.exit_code})"
        domain = agent.domain if status.has_domains else ""
        groups.setdefault((domain, f"{agent.state}{ended}", agent.round, agent.job), []).append(agent)
    for (domain, state, round_, job), members in groups.items():
        ranks = sorted(
            rank
            for agent in members
            if agent.rank is not None
            for rank in range(agent.rank, agent.rank + agent.workers)
        )
        since = [agent.since for agent in members if agent.since]
        workers = [worker for agent in members if agent.live is not None for worker in agent.live.workers]
        yield (
            compress(dict.fromkeys(agent.node for agent in members)),
            *((printable(domain),) if status.has_domains else ()),
            state,
            "" if round_ is None else str(round_),
            rank_list(ranks) if state in ("training", "done") else "",
            *(
                (
                    _span(worker.step for worker in workers),
                    _span(worker.steps_per_second for worker in workers),
                    _span(worker.checkpoint for worker in workers),
                )
                if status.live is not None
                else ()
            ),
            *((_sizes(members),) if _has_snapshots(status) else ()),
            job,
            ago(now - min(since)) if since else "",
        )


def _has_snapshots(status: RunStatus) -> bool:
    return any(agent.live is not None and agent.live.snapshot_bytes for agent in status.agents)


def _sizes(agents: Iterable[AgentView]) -> str:
    """Return the memory that each of these agents holds for snapshots, from the least to the most."""
    sizes = sorted(agent.live.snapshot_bytes for agent in agents if agent.live is not None)
    texts = dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])) if sizes else ()
    return " to ".join(texts)


def _workers(status: RunStatus) -> Iterable[tuple[str, ...]]:
    """Yield a row for each worker that has been answered for, in the order of ranks."""
    workers = [
        (worker, agent.node) for agent in status.agents if agent.live is not None for worker in agent.live.workers
    ]
    scores = {score.rank: score for score in status.scores}
    for worker, node in sorted(workers, key=lambda pair: pair[0].rank):
        score = scores.get(worker.rank)
        compared = (None, None) if score is None else (score.busy_seconds, score.relative_score)
        numbers = (worker.step, worker.steps_per_second, worker.checkpoint, *compared)
        yield str(worker.rank), node, _number(worker.pid), _does(worker), *(_number(number) for number in numbers)


def _slow(slow: SlowRankView, status: RunStatus) -> str:
    """Return the score of a slow rank, now if it is known."""
    score = next((candidate for candidate in status.scores if candidate.rank == slow.rank), None)
    if score is None or score.relative_score is None:
        return "" if slow.relative_score is None else f"score {slow.relative_score:.2f}"
    return (
        f"score {score.relative_score:.2f}, {_number(score.busy_seconds)} s per step outside of collectives, "
        f"{_number(score.loading_seconds)} s of that for input"
    )


def _does(worker: LiveWorker) -> str:
    state = {
        "starting": "before its first step",
        "stepping": "in a step" if worker.step_seconds is None else f"in a step for {worker.step_seconds:.1f} s",
        "stopped": "has stopped at the agreed step",
        "unknown": "runs; its script reports no steps",
    }.get(worker.state, worker.state)
    process = _PROCESS.get(worker.process)
    return printable(f"{state}; {process}" if process else state)


def _span(values: Iterable[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    first, last = _number(min(numbers)), _number(max(numbers))
    return first if first == last else f"{first}-{last}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"
