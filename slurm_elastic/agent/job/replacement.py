"""Jobs for nodes that a run has lost: its leader has one at a time submitted for what is missing.

`intended_size` and `decide` are pure. The leader claims a number in the run directory before each sbatch, so that there
is one sbatch per number, whoever leads. A claim without a result, as of a leader that was killed, is resolved by the
comment of the job in Slurm's queue.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from slurm_elastic import typed_json
from slurm_elastic.agent.console_log import notice
from slurm_elastic.agent.event_log import utc_now
from slurm_elastic.agent.features import Feature
from slurm_elastic.agent.job.requeue import read_history, struck_nodes
from slurm_elastic.agent.lifecycle.actions import AnnounceLeave
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.errors import ExitCode, SlurmElasticError
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.thread import Led
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.slurm import Controller, QueuedJob, natural_key
from slurm_elastic.text import counted, parse_time

logger = logging.getLogger("slurm_elastic")

_LOOK, _ASK = 5.0, 30.0
"""Seconds between two looks at the agents, and between two questions to Slurm while the agents are the same."""
_REFUSED = 300.0
"""Seconds after which a job that sbatch has refused is tried again."""
_RESOLVE_LIMIT = 120.0
"""Seconds for which Slurm answers before a claim without a job is given up; sbatch takes at most half of that."""
_KEPT = 60.0
"""Seconds within which the batch script keeps how the run was started."""
_END = 10.0
"""Seconds for which the agent waits at its end for an sbatch that is under way."""
_WISHES = frozenset({LeaveReason.DRAINED, LeaveReason.CANCELLED})


def comment(run_dir: RunDir, number: int | None = None) -> str:
    """Return the comment of jobs that make a run larger; with a number that of a replacement."""
    return f"slurm-elastic grows {run_dir.path}" + ("" if number is None else f", replacement {number}")


def grows(job: QueuedJob, run_dir: RunDir) -> bool:
    """Return True if a job was submitted to make the run larger, replacements included."""
    return job.comment == comment(run_dir) or _replaces(job, run_dir)


def _replaces(job: QueuedJob, run_dir: RunDir) -> bool:
    return job.comment.startswith(f"{comment(run_dir)}, replacement ")


@dataclass(frozen=True, slots=True)
class Claim:
    """The record of a job that is about to be submitted, with its nodes, by the clock of the leader's node.

    That of number 0 has the user's options, and the nodes for which the run has waited at its start.
    """

    nodes: int
    time: str = ""
    after: float = 0.0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a claim.

    Attributes:
        job: The job; empty if there is none.
        end: ``joined``: an agent of it has joined the run; ``gone``, ``failed``: it has left the queue before that,
            cancelled by a person or not; ``cancelling``, ``cancelled``: the run did not need it. Empty while it waits.
    """

    job: str = ""
    refused: str = ""
    end: str = ""

    @property
    def is_open(self) -> bool:
        """True if the job may still wait in the queue."""
        return bool(self.job) and self.end in ("", "cancelling")


Claims = Mapping[int, tuple[Claim, "Result | None"]]


def read_claims(run_dir: RunDir) -> Claims:
    """Return the claims by their numbers, in the order of these, each with its result; None if it is not known."""
    return {
        number: (
            typed_json.convert(claim, Claim),
            None if result is None else typed_json.convert(result, Result),
        )
        for number in reversed(run_dir.numbers("replacements"))
        if (claim := run_dir.read_record("replacements", number)) is not None
        for result in (run_dir.read_record("replaced", number),)
    }


def intended_size(events: Iterable[tuple[float, Mapping[str, Any]]], claims: Claims) -> int | None:
    """Return how many nodes a run is to have; None before its first round, so that it starts in peace.

    A round with more nodes sets the number. It gets smaller by nodes that leave by drain, shrink or scancel, and by
    those of a replacement that a person has cancelled.

    Args:
        events: The events of the run, each with its time in seconds since 1970.
    """
    first = claims[0][0].nodes if 0 in claims else 0
    gone = [claim for claim, result in claims.values() if result is not None and result.end == "gone"]
    dropped = [(parse_time(claim.time) or 0.0, {"event": "gone", "count": claim.nodes}) for claim in gone]
    size: int | None = None
    for _, event in sorted([*events, *dropped], key=lambda item: item[0]):
        back = 0
        match event:
            case {"event": "round_formed", "nodes": [*nodes]}:
                size = max(first, len(nodes)) if size is None else max(size, len(nodes))
            case {"event": "node_left", "why": LeaveReason.DRAINED.value | LeaveReason.CANCELLED.value}:
                back = 1
            case {"event": "gone", "count": int(count)}:
                back = count
        size = None if size is None else size - back
    return size


class Shortage(NamedTuple):
    """The knowledge by which the leader decides.

    Attributes:
        missing: The nodes for which no job of the run waits but replacements.
        pending: Replacements that wait, each with its nodes, the newest last.
        submitted: The number of replacements so far.
        unresolved: True if it is not known yet whether the last one was.
    """

    missing: int
    pending: tuple[tuple[str, int], ...] = ()
    short_for: float = 0.0
    submitted: int = 0
    unresolved: bool = False


class Submit(NamedTuple):
    """Submit a job."""

    nodes: int


class Cancel(NamedTuple):
    """Cancel a replacement that waits."""

    job: str


def decide(shortage: Shortage, after: float, limit: int) -> Submit | Cancel | None:
    """Decide what is done about missing nodes; replacements for more than these are cancelled, the newest first."""
    if sum(nodes for _, nodes in shortage.pending) > shortage.missing:
        return Cancel(shortage.pending[-1][0])
    if shortage.pending or shortage.unresolved or shortage.short_for < after or shortage.submitted >= limit:
        return None
    return Submit(shortage.missing) if shortage.missing else None


class Submission(Protocol):
    """Submits jobs like the first one of a run."""

    def time_limit(self, run_dir: RunDir) -> str | None:
        """Return the time limit of the first job, empty for none; None if it is not on record how it was submitted."""

    def submit(self, run: RendezvousConfig, number: int, nodes: int, exclude: Sequence[str]) -> Result | None:
        """Submit a job for a claim; None if it is not known whether there is a job now."""


@dataclass
class _Memory:
    """The memory of a leader between two looks; times are monotonic."""

    agents: tuple[str, ...] | None = None
    next_at: float = 0.0
    short_since: float | None = None
    refused_at: float | None = None
    unresolved_since: dict[int, float] = field(default_factory=dict)


class Replacer(Feature):
    """Has lost nodes replaced while this agent leads, in a thread of its own; `look` is one turn of it.

    Args:
        led: Returns the agents of the run if this agent leads, with True if it did last; otherwise None.
    """

    def __init__(
        self,
        values: OptionValues,
        run: RendezvousConfig,
        led: Callable[[bool], Led | None],
        submission: Submission,
        controller: Controller | None = None,
    ) -> None:
        self._after, self._limit = values.replace_lost or 0.0, values.replace_limit
        self._most_excluded, self._run, self._run_dir = values.max_excluded, run, run.run_dir
        self._led, self._submission = led, submission
        self._controller = controller or Controller()
        self._memory, self._lines = _Memory(), set[str]()
        self._first_look: float | None = None
        self._begun = False
        self._last: Led | None = None
        self._leave: LeaveReason | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="slurm-elastic-replacement", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def leave_announced(self, leave: AnnounceLeave) -> None:
        self._leave = leave.reason

    def run_ended(self) -> None:
        self._last = self._led(True)
        self._over.set()

    def close(self, code: ExitCode, *, leads: bool) -> None:
        """Cancel what waits for a run that is over."""
        if self._thread.ident is not None:
            self._thread.join(_END)
        last = self._last
        all_leave = self._leave in _WISHES and last is not None and not last.staying
        if not all_leave and not (leads and code in (ExitCode.FINISHED, ExitCode.FAILED)):
            return
        for job in self._controller.own_jobs(by_element=True) or ():
            if grows(job, self._run_dir) and job.state == "PENDING":
                notice(f"the run is over: job {job.name}, which waits to join it, is cancelled")
                self._controller.cancel(job.name, if_pending=True)

    def _live(self) -> None:
        while not self._over.wait(min(_LOOK, self._after / 2)):
            try:
                self.look(time.monotonic())
            except (SlurmElasticError, OSError, typed_json.JSONError) as error:
                self._say(f"lost nodes are not replaced now: {error}")

    def look(self, now: float) -> None:
        """Look at the agents, and act if nodes are missing or replacements wait."""
        led = self._led(False)
        if led is None or led.ending or not self._begin(now):
            self._memory = _Memory()
            return
        memory = self._memory
        if led.staying == memory.agents and now < memory.next_at:
            return
        memory.agents, memory.next_at = led.staying, now + _ASK
        claims = read_claims(self._run_dir)
        size = intended_size(read_history(self._run_dir, progress=False), claims)
        waits = any(number and (result is None or result.is_open) for number, (_, result) in claims.items())
        if size is not None and size <= len(led.staying) and not waits:
            # Nothing changes by itself.
            memory.next_at, memory.short_since = math.inf, None
            return
        queue = self._controller.own_jobs(by_element=True)
        if queue is None:
            self._say("lost nodes are replaced when Slurm answers again")
            return
        claims = self._resolve(claims, queue, now)
        self._act(led, self._shortage(led, claims, queue, now), claims, now)

    def _begin(self, now: float) -> bool:
        """Say, once for the run, what replacements may cost. Returns False while there can be none."""
        if self._begun:
            return True
        if shutil.which("sbatch") is None:
            self._say("lost nodes are not replaced: there is no sbatch here; agents in an image need Slurm's commands")
            return False
        self._first_look = now if self._first_look is None else self._first_look
        limit = self._submission.time_limit(self._run_dir)
        if limit is None:
            if now - self._first_look > _KEPT:
                self._say(
                    "lost nodes are not replaced: how the run was started is not on record; its batch script has to "
                    "have the lines of slurm-elastic template, with job-end wait beside srun, and one run"
                )
            return False
        self._begun = True
        claim = Claim(len(self._run.expected_nodes), utc_now(), self._after, self._limit)
        if self._run_dir.claim_record(asdict(claim), "replacements", 0):
            up_to = f" of up to {limit} each" if limit else ""
            notice(
                f"lost nodes are replaced: after {self._after:g} s a job like the first one is submitted for them, "
                f"one at a time, at most {self._limit} in all{up_to} (--replace-lost, --replace-limit)"
            )
        return True

    def _resolve(self, claims: Claims, queue: Sequence[QueuedJob], now: float) -> Claims:
        """Record what has become of claims, by Slurm's queue."""
        jobs, since = RunContents(self._run_dir).jobs(), self._memory.unresolved_since
        for number, (_, result) in claims.items():
            waiting = [job for job in queue if job.comment == comment(self._run_dir, number)]
            if not number:
                continue
            if result is None:
                name = waiting[0].name.partition("_")[0] if waiting else ""
                if name or now - since.setdefault(number, now) >= _RESOLVE_LIMIT:
                    self._run_dir.claim_record(asdict(Result(name)), "replaced", number)
            elif result.is_open and (result.job in jobs or not waiting):
                end = "joined" if result.job in jobs else "cancelled"
                if not result.end and result.job not in jobs:
                    # What a person has cancelled is not submitted again.
                    view = self._controller.job(result.job)
                    end = "gone" if view is None or view.state == "CANCELLED" else "failed"
                self._run_dir.publish_record(asdict(replace(result, end=end)), "replaced", number)
        return read_claims(self._run_dir)

    def _shortage(self, led: Led, claims: Claims, queue: Sequence[QueuedJob], now: float) -> Shortage:
        jobs, coming = RunContents(self._run_dir).jobs(), 0
        pending: list[QueuedJob] = []
        for job in queue:
            took_part = job.job_id in jobs
            ours = took_part or grows(job, self._run_dir) or job.name.partition("_")[0] == self._run_dir.run_id
            if job.state == "PENDING" and _replaces(job, self._run_dir) and not took_part:
                pending.append(job)
            elif ours and (job.state in ("PENDING", "CONFIGURING") or (job.state == "RUNNING" and not took_part)):
                coming += job.nodes
        size = intended_size(read_history(self._run_dir, progress=False), claims) or 0
        missing = max(0, min(self._run.max_nodes, size) - len(led.staying) - coming)
        memory = self._memory
        memory.short_since = (memory.short_since or now) if missing else None
        short_for = 0.0 if memory.short_since is None else now - memory.short_since
        if memory.short_since is not None and short_for < self._after:
            memory.next_at = min(memory.next_at, memory.short_since + self._after)
        results = [result for number, (_, result) in claims.items() if number]
        waiting = tuple((job.name, job.nodes) for job in sorted(pending, key=lambda job: natural_key(job.name)))
        submitted = sum(result is None or not result.refused for result in results)
        return Shortage(missing, waiting, short_for, submitted, None in results)

    def _act(self, led: Led, shortage: Shortage, claims: Claims, now: float) -> None:
        decision = decide(shortage, self._after, self._limit)
        if self._run.records.newest_epoch() != led.epoch or self._over.is_set():
            return
        match decision:
            case Cancel(job):
                for number, (_, result) in claims.items():
                    if result is not None and result.is_open and job.partition("_")[0] == result.job:
                        self._run_dir.publish_record(asdict(replace(result, end="cancelling")), "replaced", number)
                notice(f"job {job}, which waits to replace lost nodes, is cancelled: the run does not need it any more")
                self._controller.cancel(job, if_pending=True)
            case Submit(nodes):
                refused_at = self._memory.refused_at
                if refused_at is None or now - refused_at >= _REFUSED:
                    self._submit(max(claims, default=0) + 1, nodes, shortage.submitted + 1, now)
            case None if shortage.missing and not shortage.pending and shortage.submitted >= self._limit:
                self._say(f"lost nodes are not replaced any more: {shortage.submitted} jobs were submitted for them")

    def _submit(self, number: int, nodes: int, count: int, now: float) -> None:
        exclude = struck_nodes(self._run_dir, self._most_excluded)
        if not self._run_dir.claim_record(asdict(Claim(nodes, utc_now())), "replacements", number):
            return
        result = self._submission.submit(self._run, number, nodes, exclude)
        if result is None:
            self._say("sbatch has given no answer: whether it has submitted a job is seen in Slurm's queue")
            return
        if result.refused:
            self._memory.refused_at = now
            self._say(f"no job for lost nodes: {result.refused}; it is tried again every {_REFUSED / 60:.0f} minutes")
        if not self._run_dir.claim_record(asdict(result), "replaced", number):
            # Another leader has found the job in the queue, or has given this claim up and submitted another one.
            _, other = read_claims(self._run_dir)[number]
            if result.job and other is not None and other.job != result.job:
                self._controller.cancel(result.job)
        elif result.job:
            what = f"{counted(nodes, 'node')} that the run has lost"
            notice(f"job {result.job} is submitted for {what}, {count} of {self._limit}")

    def _say(self, line: str) -> None:
        if line not in self._lines:
            self._lines.add(line)
            logger.warning("%s", line)
