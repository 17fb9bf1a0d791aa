"""Features of the agent: what happens beside the life cycle, at points that the agent offers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_elastic.agent.forkserver import ForkServer
from slurm_elastic.agent.health import Place, Reporter, Stage, WorkerPlace
from slurm_elastic.agent.lifecycle import (
    AnnounceLeave,
    Joining,
    Lingering,
    Rejoin,
    Reported,
    State,
    Stopping,
    WorkersResult,
)
from slurm_elastic.agent.scratch_dir import NodeDirectory
from slurm_elastic.agent.watchdog import Hang, Watchdog, Watched
from slurm_elastic.control import WorkerProgress
from slurm_elastic.failures import BY_WATCHDOG
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.membership import WorkerFailure
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.snapshot.agent_side import AgentMemory

__all__ = [
    "Feature",
    "HealthFeature",
    "LearnedImportsFeature",
    "RunningRound",
    "SnapshotFeature",
    "WatchdogFeature",
    "hang_event",
]

_EARLY = 120.0
"""Seconds in which a worker that reports no steps is taken not to have made its first one."""
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""What a process gets for what it does itself."""


@dataclass(frozen=True, slots=True)
class RunningRound:
    """The workers of a round on this node.

    Attributes:
        placed: the place of this node.
        pids: their process ids, by local rank.
        environments: what was added to the environment of each, by local rank.
        progress: says how far they are, by local rank; from any thread.
    """

    placed: Assignment
    pids: Mapping[int, int]
    environments: Mapping[int, Mapping[str, str]]
    progress: Callable[[], Sequence[WorkerProgress]]


class Feature:
    """One feature of an agent. Its methods are called on the main thread, so none of them may block.

    Attributes:
        fd: a descriptor that wakes the main loop when it is readable; None for none.
    """

    fd: int | None = None

    def loop_turned(self) -> None:
        """The main loop is awake; also called while it starts workers, again and again."""

    def state_changed(self, state: State) -> None:
        """The life cycle is in another state."""

    def inventory(self) -> str:
        """Return what this node holds for the workers of the next round; see :class:`~.membership.AgentInfo`.

        Called when it joins: no workers run. Empty for nothing; the first feature that has something counts.
        """
        return ""

    def round_formed(self, placed: Assignment, environments: Mapping[int, dict[str, str]]) -> None:
        """The workers of a round are about to start. May add to the environment of each, by local rank."""

    def workers_started(self, running: RunningRound) -> None:
        """The workers run."""

    def attribute(self, failure: WorkerFailure, pid: int) -> WorkerFailure:
        """Return the failure of the worker with this process id, with what is known about its cause."""
        return failure

    def exits_expected(self) -> None:
        """The workers are about to be stopped: their end is no failure from now on."""

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        """No worker of the round runs any more; `progress` is how far they came."""

    def leave_announced(self, leave: AnnounceLeave) -> None:
        """The agent has said that it leaves; again when more is known."""

    def run_ended(self) -> None:
        """The agent ends, whatever happened."""


class HealthFeature(Feature):
    """Shows on the health port what the agent is doing.

    Args:
        reporter: of the health port.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._stage: Stage | None = None
        self.fd = reporter.fd

    def loop_turned(self) -> None:
        """See base class."""
        self._reporter.answer()

    def state_changed(self, state: State) -> None:
        """See base class."""
        stage = _stage(state)
        if stage is None or stage is self._stage:
            return
        self._stage = stage
        if stage is Stage.JOINING:
            self._reporter.join()
        else:
            self._reporter.enter(stage)

    def workers_started(self, running: RunningRound) -> None:
        """See base class."""
        self._stage = Stage.TRAINING
        self._reporter.train(_place(running), running.placed.restarts)

    def round_ended(self, progress: Sequence[WorkerProgress]) -> None:
        """See base class."""
        self._reporter.count(sum(worker.boundary for worker in progress))

    def leave_announced(self, leave: AnnounceLeave) -> None:
        """See base class."""
        self._reporter.notice(leave.reason.value, leave.detail, leave.seconds)


def _stage(state: State) -> Stage | None:
    """The stage that a state is shown as; None if that does not change with it."""
    match state:
        case Joining(spare=spare):
            return Stage.SPARE if spare else Stage.JOINING
        case Reported(result=WorkersResult.SUCCEEDED):
            return Stage.DONE
        case Reported(result=WorkersResult.FAILED):
            return Stage.FAILED
        case Stopping(then=Rejoin()):
            return Stage.STOPPING
        case Stopping() | Lingering():
            return Stage.LEAVING
        case _:
            return None


def _place(running: RunningRound) -> Place:
    placed, place = running.placed, running.placed.place
    return Place(
        round=placed.round,
        reason=placed.reason.value,
        nodes=placed.nodes,
        members=placed.members,
        node_rank=place.rank,
        world_size=placed.world_size,
        workers=tuple(WorkerPlace(place.base_rank + local, local, pid) for local, pid in sorted(running.pids.items())),
    )


class WatchdogFeature(Feature):
    """Has the watchdog look after the workers of each round.

    Args:
        watchdog: started, or to be started before the first round; stopped when the run has ended.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def round_formed(self, placed: Assignment, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        for environment in environments.values():
            environment[self._watchdog.variable] = self._watchdog.path
        self._watchdog.expect()

    def workers_started(self, running: RunningRound) -> None:
        """See base class."""
        self._watchdog.watch(_watched(running), running.progress)

    def attribute(self, failure: WorkerFailure, pid: int) -> WorkerFailure:
        """See base class."""
        hang = self._watchdog.hang_of(pid)
        return failure if hang is None else replace(failure, message=f"{BY_WATCHDOG}{hang}", hung=True)

    def exits_expected(self) -> None:
        """See base class."""
        self._watchdog.unwatch()

    def run_ended(self) -> None:
        """See base class."""
        self._watchdog.stop()


class SnapshotFeature(Feature):
    """Keeps what workers save in memory, for the workers of later rounds.

    Args:
        rendezvous: of this agent.
        told_to_go: says whether a signal has asked this agent to leave.

    Raises:
        OSError: the memory cannot be made.
    """

    def __init__(self, rendezvous: RendezvousConfig, told_to_go: Callable[[], bool]) -> None:
        self._margin, self._told_to_go = rendezvous.options.leave_margin, told_to_go
        self._until: float | None = None
        self._directory = NodeDirectory("snapshot")
        try:
            self._memory = AgentMemory(
                self._directory.path,
                rendezvous.run_dir.secret(),
                rendezvous.incarnation,
                rendezvous.agent,
                rendezvous.node,
                rendezvous.address,
            )
        except OSError:
            self._directory.close()
            raise

    def inventory(self) -> str:
        """See base class."""
        return self._memory.inventory()

    def round_formed(self, placed: Assignment, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        variables = self._memory.begin(placed.round, placed.origin, first=placed.place.rank == 0)
        for environment in environments.values():
            environment.update(variables)

    def leave_announced(self, leave: AnnounceLeave) -> None:
        """See base class."""
        # The rest of the margin is for the end of the agent and of its job.
        self._until = time.monotonic() + leave.seconds - min(self._margin / 2, leave.seconds / 4)

    def run_ended(self) -> None:
        """See base class."""
        self._memory.close(self._until, self._told_to_go)
        self._directory.close()


class LearnedImportsFeature(Feature):
    """Starts workers without learned imports after one that died of them, as it seems; once, and uncharged.

    Args:
        fork_server: forks the workers.
        now: monotonic time in seconds.
    """

    def __init__(self, fork_server: ForkServer, now: Callable[[], float] = time.monotonic) -> None:
        self._fork_server, self._now = fork_server, now
        self._running: RunningRound | None = None
        self._since = 0.0

    def workers_started(self, running: RunningRound) -> None:
        """See base class."""
        self._running, self._since = running, self._now()

    def attribute(self, failure: WorkerFailure, pid: int) -> WorkerFailure:
        """See base class."""
        early = self._now() - self._since < _EARLY and not any(worker.boundary for worker in self._progress())
        if not (failure.hung or -failure.exit_code in _FAULTS) or not early or not self._fork_server.has_learned:
            return failure
        how = "hangs" if failure.hung else f"died by {signal.Signals(-failure.exit_code).name}"
        reason = f"a worker {how} before its first step"
        self._fork_server.distrust_learned(reason)
        message = f"{failure.message}; {reason} and starts again without learned imports".removeprefix("; ")
        return replace(failure, message=message, uncharged=True)

    def _progress(self) -> Sequence[WorkerProgress]:
        return self._running.progress() if self._running is not None else ()


def _watched(running: RunningRound) -> list[Watched]:
    # The logs specs have put the path of the error file beside the logs.
    return [
        Watched(pid, int(env["RANK"]), rank, running.placed.round, Path(error).parent if error else None)
        for rank, pid in running.pids.items()
        for env in [running.environments[rank]]
        for error in [env.get("TORCHELASTIC_ERROR_FILE")]
    ]


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
    }
    return Entry("worker_hung", f"rank {hang.worker.rank} on {node} hangs: {hang}", fields)
