"""Features of the agent: additions to the life cycle, which the agent calls at given points."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.health.state import Leave, Readings, Reporter, RoundInfo, Stage, enter
from slurm_elastic.agent.lifecycle.actions import AnnounceLeave
from slurm_elastic.agent.lifecycle.states import Joining, Lingering, Rejoin, Reported, State, Stopping
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.agent.root_cause import aborted_at_exit, memory_kills, named_error, words
from slurm_elastic.agent.watchdog.hangs import Hang
from slurm_elastic.agent.watchdog.stacks import Watched, resident
from slurm_elastic.agent.watchdog.timers import FILE_VARIABLE
from slurm_elastic.agent.watchdog.watchdog import Watchdog
from slurm_elastic.control.agent_side import Agreement, WorkerProgress
from slurm_elastic.failures import causes
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.text import size_text

EARLY = 120.0
"""Seconds after the start in which workers that report no steps are assumed to be before their first one; many models
load for a minute."""
_EXCUSED = 2
"""Rounds in which an agent does not charge the fault of its node: one that goes on failing has to end the run."""
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals that the kernel or the C library sends to a process for an error of its own."""


@dataclass(frozen=True, slots=True)
class RunningRound(RoundInfo):
    """The workers of a round on this node, while they run.

    Attributes:
        environments: The variables that were added to each worker's environment, by local rank.
        progress: Returns the workers' progress by local rank; from any thread.
        since: Own monotonic time in seconds at which they have started.
    """

    environments: Mapping[int, Mapping[str, str]]
    progress: Callable[[], Sequence[WorkerProgress]]
    agreement: Agreement | None = None
    since: float = field(default_factory=time.monotonic)


class Feature:
    """One feature of an agent. Its methods are called on the main thread, so none of them may block."""

    fd: int | None = None
    """A descriptor that wakes the main loop when it is readable; None for none."""
    missing = ""
    """After the end: why the newest checkpoint is not on disk; empty if it is, or if the script asked for none."""

    def loop_turned(self) -> None:
        """The main loop has woken up; also called every 0.1 s while it starts workers."""

    def state_changed(self, state: State) -> None:
        """The life cycle has entered another state."""

    def inventory(self) -> str:
        """Return what this node holds for the workers of the next round, as the agent joins; empty for nothing."""
        return ""

    def round_formed(self, assignment: Assignment, environments: Mapping[int, dict[str, str]]) -> None:
        """The workers of a round are about to start; variables may be added to `environments`, by local rank."""

    def workers_started(self, running: RunningRound) -> None:
        """The workers run."""

    def attribute(self, running: RunningRound, failure: WorkerFailure, pid: int) -> WorkerFailure:
        """Return the failure of the worker with this process id, with the cause added if the feature knows it."""
        return failure

    def tells_end(self, pid: int) -> bool:
        """Return True if the feature tells of the end of this worker, so that its last words need not."""
        return False

    def stop_agreed(self, reason: str) -> None:
        """The workers of the round stop at a step; the reason is that which training scripts get."""

    def exits_expected(self, *, unplanned: bool) -> None:
        """The agent is about to stop the workers: from now on their end is no failure."""

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        """No worker of the round runs any more; `progress` is what they have last reported."""

    def leave_announced(self, leave: AnnounceLeave) -> None:
        """The agent has announced its leave; called again when it learns more about it."""

    def run_ended(self) -> None:
        """The agent ends, whatever happened."""

    def status(self, readings: Readings) -> Readings:
        """Return the readings with what the feature knows; from any thread."""
        return readings


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Snapshots as an agent knows them.

    Attributes:
        choose_origin: See :class:`~slurm_elastic.rendezvous.membership.config.Settings`.
        step_of: Returns the step of the snapshot that an origin names; None if it names none.
        feature: Makes the feature that holds them, with its socket in the agent's directory; None where this node has
            no memory for it.
    """

    choose_origin: Callable[[int | None, str, Sequence[str], bool], str]
    step_of: Callable[[str], int | None]
    feature: Callable[[OptionValues, RendezvousConfig, ForkServer, Path], Feature | None]


class HealthFeature(Feature):
    """Reports the state of the agent to its health port."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._steps: tuple[int, Callable[[], Sequence[WorkerProgress]]] = 0, tuple
        """The steps of the workers here in all rounds before, and what returns their progress in this one."""
        self.fd = reporter.fd

    def loop_turned(self) -> None:
        self._reporter.answer()

    def state_changed(self, state: State) -> None:
        stage, now = _stage(state), time.monotonic()
        if stage is not None and stage is not self._reporter.state.stage:
            self._reporter.change(lambda state: enter(state, stage, now))

    def workers_started(self, running: RunningRound) -> None:
        before, progress = self._steps
        self._steps, now = (before + _steps(progress()), running.progress), time.monotonic()
        self._reporter.change(lambda state: enter(replace(state, round_info=running), Stage.TRAINING, now))

    def leave_announced(self, leave: AnnounceLeave) -> None:
        announced = Leave(leave.reason.value, leave.detail, time.monotonic() + leave.seconds)
        # Once for each reason: more may become known about a leave.
        self._reporter.change(
            lambda state: replace(
                state, notices=tuple(dict.fromkeys((*state.notices, announced.reason))), leave=announced
            )
        )

    def run_ended(self) -> None:
        # What follows may take minutes, as for the last checkpoint, and the main loop answers no probe any more.
        self._reporter.over()

    def status(self, readings: Readings) -> Readings:
        before, progress = self._steps
        workers = progress()
        return replace(readings, progress=workers, steps=before + _steps(workers))


def _steps(progress: Sequence[WorkerProgress]) -> int:
    return sum(worker.boundary for worker in progress)


def _stage(state: State) -> Stage | None:
    match state:
        case Joining(spare=spare):
            return Stage.SPARE if spare else Stage.JOINING
        case Reported(succeeded=True):
            return Stage.DONE
        case Reported(succeeded=False):
            return Stage.FAILED
        case Stopping(then=Rejoin()):
            return Stage.STOPPING
        case Stopping() | Lingering():
            return Stage.LEAVING
        case _:
            return None


class WatchdogFeature(Feature):
    """Lets the watchdog watch the workers of each round."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def round_formed(self, assignment: Assignment, environments: Mapping[int, dict[str, str]]) -> None:
        for environment in environments.values():
            environment[FILE_VARIABLE] = self._watchdog.path

    def workers_started(self, running: RunningRound) -> None:
        self._watchdog.watch(_watched(running), running.agreement)

    def attribute(self, running: RunningRound, failure: WorkerFailure, pid: int) -> WorkerFailure:
        hang = self._watchdog.hang_of(pid)
        return failure if hang is None else replace(failure, message=f"{causes.BY_WATCHDOG}{hang}", hung=True)

    def tells_end(self, pid: int) -> bool:
        return self._watchdog.hang_of(pid) is not None

    def exits_expected(self, *, unplanned: bool) -> None:
        self._watchdog.unwatch()

    def run_ended(self) -> None:
        self._watchdog.stop()

    def status(self, readings: Readings) -> Readings:
        return replace(readings, watchdog_age=self._watchdog.age(), ignored=self._watchdog.dropped)


class LearnedImportsFeature(Feature):
    """Starts workers without learned imports after one that may have died of them; once, and uncharged."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server

    def attribute(self, running: RunningRound, failure: WorkerFailure, pid: int) -> WorkerFailure:
        early = time.monotonic() - running.since < EARLY and not any(worker.boundary for worker in running.progress())
        if not (failure.hung or -failure.exit_code in _FAULTS) or not early or not self._fork_server.has_learned:
            return failure
        how = "hangs" if failure.hung else f"died by {signal.Signals(-failure.exit_code).name}"
        reason = f"a worker {how} before its first step"
        self._fork_server.distrust_learned(reason)
        message = f"{failure.message}; {reason} and starts again without learned imports".removeprefix("; ")
        return replace(failure, message=message, uncharged=True)


def _watched(running: RunningRound) -> Iterator[Watched]:
    for rank, local_rank, pid in running.workers:
        # RoundLogsSpecs puts the error file into the directory of the logs.
        error = running.environments[local_rank].get("TORCHELASTIC_ERROR_FILE")
        yield Watched(pid, rank, local_rank, running.assignment.round, Path(error).parent if error else None)


def hang_event(node: str, hang: Hang) -> Entry:
    """Return the event of a worker that hangs."""
    fields: dict[str, object] = {
        "round": hang.worker.round,
        "rank": hang.worker.rank,
        "pid": hang.worker.pid,
        "scope": hang.scope,
        "steps": hang.steps,
        "seconds": round(hang.seconds, 3),
        "state": hang.state,
        "signal": hang.killed.name if hang.killed is not None else "",
        "stacks": hang.stacks,
        "in_collective": hang.in_collective,
    }
    return Entry("worker_hung", f"rank {hang.worker.rank} on {node} hangs: {hang}", fields)


class AttributionFeature(Feature):
    """Attributes the failures of workers; it has to know which of them hung."""

    def __init__(self, *, compare: bool = True) -> None:
        self._compare = compare
        self._before: int | None = None
        self._excused: set[int] = set()

    def workers_started(self, running: RunningRound) -> None:
        self._before = memory_kills()

    def attribute(self, running: RunningRound, failure: WorkerFailure, pid: int) -> WorkerFailure:
        if failure.exit_code == -signal.SIGKILL and not failure.hung and self._killed_by_kernel():
            cause_text = f"{causes.BY_KERNEL}out of memory on {failure.node}{_who_has_memory(running)}"
            failure = replace(failure, message="\n".join(filter(None, (cause_text, failure.message))))
            text = failure.message
        else:
            # The message may lack the line that tells.
            text = failure.message if failure.hung else words(failure.error_file, failure.log) or failure.message
        # Whether it is aborted is chance: the exception is the cause.
        code = 1 if aborted_at_exit(text, failure.exit_code, failure.error_file) else failure.exit_code
        attribution, where = causes.attribute(text, code), _position(running, pid)
        cause = attribution.cause
        same = causes.fingerprint(attribution, text, code, where) if self._compare else ""
        excused = self._is_excused(cause, running.assignment.round)
        excuse = f"not charged to the script, {len(self._excused)} of {_EXCUSED} for {failure.node}" if excused else ""
        return replace(
            failure,
            cause=cause.name,
            domain=cause.domain,
            outlook=cause.outlook,
            error="" if failure.hung or text.startswith(causes.BY_KERNEL) else named_error(text),
            detail="; ".join(filter(None, (attribution.detail, excuse))),
            uncharged=failure.uncharged or excused,
            consequence=cause.consequence,
            timed_out=cause.name == "collective_timeout",
            where=where or "",
            fingerprint=same,
        )

    def _is_excused(self, cause: causes.Cause, round_: int) -> bool:
        """Return True if this is the node's fault, and the node has not had too many rounds with one."""
        if (cause.domain, cause.outlook) != ("node", "elsewhere"):
            return False
        if len(self._excused) < _EXCUSED:
            self._excused.add(round_)
        return round_ in self._excused

    def _killed_by_kernel(self) -> bool:
        now = memory_kills()
        return self._before is not None and now is not None and now > self._before


def _position(running: RunningRound, pid: int) -> str | None:
    worker = next((progress for progress in running.progress() if running.pids.get(progress.local_rank) == pid), None)
    return None if worker is None else causes.position(worker.boundary if worker.attached else None, worker.step)


def _who_has_memory(running: RunningRound) -> str:
    sizes = ((rank, resident(pid)) for rank, _, pid in running.workers)
    sizes_text = [f"rank {rank} has {size_text(size)}" for rank, size in sizes if size]
    return f"; {', '.join(sizes_text)}" if sizes_text else ""
