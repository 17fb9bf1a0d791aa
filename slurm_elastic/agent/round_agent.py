"""The workers of each round on one node, started, stopped and cleared away."""

from __future__ import annotations

import enum
import logging
import os
import select
import signal
import time
from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.agreement import StepAgreement
from slurm_elastic.agent.forkserver import StartInterruptedError
from slurm_elastic.agent.health import Reporter, Stage
from slurm_elastic.agent.inquiry import Inquiry
from slurm_elastic.agent.outcome import AgentOutcome
from slurm_elastic.agent.places import place_of, slowest, survivors, watched
from slurm_elastic.agent.root_cause import BY_WATCHDOG, last_words
from slurm_elastic.agent.signals import Notices
from slurm_elastic.agent.torch_agent import TorchAgent
from slurm_elastic.agent.watchdog import Watchdog
from slurm_elastic.agent.worker_env import worker_environment
from slurm_elastic.agent.worker_processes import Starter, WorkerProcesses
from slurm_elastic.control import WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.connect import Seat
from slurm_elastic.rendezvous.membership import LeaveReason, WorkerFailure
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.transport.messages import Placed
from slurm_elastic.rendezvous.worker_store import FreshPorts, ReservedPort, open_worker_store

__all__ = ["UNPLANNED_STOP_TIMEOUT", "Doing", "RoundAgent"]

logger = logging.getLogger("slurm_elastic")

UNPLANNED_STOP_TIMEOUT = 0.5
"""Seconds for workers whose group is broken: they block in a collective with a peer that is gone, and a Python signal
handler does not run while they do. What they hold in memory is of no use to anybody any more."""


class Doing(enum.Enum):
    """What an agent is doing."""

    JOINING = enum.auto()
    TRAINING = enum.auto()
    DONE = enum.auto()
    """The workers ended well, or failed and that was reported: the leader's word is awaited."""
    GIVEN_UP = enum.auto()
    """The start of the workers was given up for something else that came: the leader's word is awaited."""
    STOPPING = enum.auto()
    LINGERING = enum.auto()
    """The workers have stopped at the agreed step, and this agent leaves when the others have, too: it serves their
    store, or leads."""


class RoundAgent(TorchAgent):
    """One node's agent.

    Args:
        spec: torch's description of the workers.
        logs_specs: where their output goes.
        seat: of this agent in the run.
        coordination: in touch with the leader, or about to be.
        notices: the signals that came so far.
        inquiry: finds out what they mean.
        starter: starts the processes of a round.
        reporter: told what this agent is doing.
        watchdog: finds workers that hang; not started. None for none.
        shutdown_timeout: seconds that workers get between SIGTERM and SIGKILL when a round ends as planned.
        worker_signal: sent to workers when a planned end of their round is announced. None for none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        seat: Seat,
        coordination: Coordination,
        notices: Notices,
        inquiry: Inquiry,
        starter: Starter,
        reporter: Reporter,
        *,
        watchdog: Watchdog | None = None,
        shutdown_timeout: int = 30,
        worker_signal: signal.Signals | None = None,
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=shutdown_timeout)
        self._seat, self._coordination, self._starter = seat, coordination, starter
        self._notices, self._inquiry = notices, inquiry
        self._reporter, self._watchdog, self._worker_signal = reporter, watchdog, worker_signal
        self._stop_timeout = shutdown_timeout
        self._agreement = StepAgreement()
        self._doing = Doing.JOINING
        self._processes: WorkerProcesses | None = None
        self._placed: Placed | None = None
        self._ports = FreshPorts()
        self._reserved: ReservedPort | None = None
        self._round_store: TCPStore | None = None
        self._result = RunResult(state=WorkerState.HEALTHY)
        self._after_stop: Callable[[], RunResult | None] = self._join
        self._stop_by = 0.0
        self._terminate_at: float | None = None
        self._told_to_go = False
        self._last_checkpoint: int | None = None
        self._signalled = self._as_agreed = False
        self.outcome = AgentOutcome(ExitCode.FAILED)
        coordination.slowest = lambda: slowest(self._placed, self.progress())

    # Rounds.

    def progress(self) -> tuple[WorkerProgress, ...]:
        """How far the workers here are, by local rank; from any thread."""
        return self._agreement.progress()

    @property
    def last_place(self) -> Placed | None:
        """The place in the round that runs here or ran last, None before the first and while the next one forms."""
        return self._placed

    def last_checkpoint(self) -> int | None:
        """The newest checkpoint that a worker here has reported, None if none did; from any thread."""
        steps = [worker.checkpoint for worker in self._agreement.progress() if worker.checkpoint is not None]
        return max(steps, default=self._last_checkpoint)

    def _join(self) -> RunResult | None:
        self._doing = Doing.JOINING
        self._reporter.join()
        if not self._as_agreed and not self._signalled:
            # Else workers on other nodes may still be saving; then it is served until the next round.
            self._round_store = None
            self._serve(None)
        self._placed = None
        self._reserved = self._ports.reserve()
        self._coordination.join(self._seat.candidate(self._reserved.port))
        return None

    def _start_round(self, placed: Placed) -> None:
        assert self._reserved is not None
        self._placed = placed
        self._signalled = self._as_agreed = False
        self._round_store = open_worker_store(placed, self._reserved)
        self._serve(self._round_store)
        self._take_place(placed)
        try:
            pids = self._start_processes(placed)
        except StartInterruptedError:
            self._doing = Doing.GIVEN_UP
            return
        except OSError as error:
            # A program that cannot be run here, such as one whose interpreter is missing: a worker that fails at once,
            # with the exit code of a shell.
            failure = WorkerFailure(self._seat.agent, self._seat.node, placed.place.base_rank, 127, str(error))
            self._coordination.worker_failed(failure)
            self._doing = Doing.DONE
            return
        self._started(pids)
        self._doing = Doing.TRAINING
        self._reporter.train(place_of(placed, pids), placed.restarts)

    def _start_processes(self, placed: Placed) -> dict[int, int]:
        envs = {
            worker.local_rank: worker_environment(self._spec, worker, placed, self._seat, os.environ)
            for worker in self._own_workers
        }
        self._agreement.open(placed.round, len(envs))
        for local_rank, env in envs.items():
            env.update(self._agreement.environment(local_rank))
            self._number_device(env, local_rank)
        if self._watchdog is not None:
            for env in envs.values():
                env[self._watchdog.variable] = self._watchdog.path
            self._watchdog.expect()
        self._processes = self._starter(self._spec, envs, self._something_else_came)
        pids = self._processes.pids()
        if self._watchdog is not None:
            self._watchdog.watch(watched(pids, envs, placed.round), self._agreement.progress)
        return pids

    def _something_else_came(self) -> bool:
        self._reporter.answer()
        words, _, _ = select.select([self._coordination.fd], [], [], 0)
        return bool(words) or self._notices.first() is not None

    def _first_failure(self, result: RunResult) -> WorkerFailure:
        assert self._placed is not None
        seat = self._seat
        if not result.failures:
            return WorkerFailure(seat.agent, seat.node, self._placed.place.base_rank, 1, "a worker cannot be stopped")
        rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
        log = self._processes.stderr_of(failure.local_rank) if self._processes is not None else ""
        hang = self._watchdog.hang_of(failure.pid) if self._watchdog is not None else None
        return WorkerFailure(
            agent=seat.agent,
            node=seat.node,
            rank=rank,
            exit_code=failure.exitcode,
            message=f"{BY_WATCHDOG}{hang}" if hang is not None else last_words(str(failure.error_file), log),
            error_file=str(failure.error_file),
            log=log,
            hung=hang is not None,
        )

    # Stopping.

    def _stop(self, then: Callable[[], RunResult | None], timeout: float, *, gently: bool = False) -> None:
        """Tell the workers to end, and do `then` when they have, or when `timeout` seconds are over.

        With `gently`, those that have got the signal for a planned end have the time for that first.
        """
        self._after_stop = then
        self._reporter.enter(Stage.LEAVING if self._told_to_go else Stage.STOPPING)
        by = time.monotonic() + timeout
        self._stop_by = min(self._stop_by, by) if self._doing is Doing.STOPPING else by
        if self._watchdog is not None:
            self._watchdog.unwatch()
        if self._doing is not Doing.STOPPING:
            if gently and self._signalled:
                self._terminate_at, self._stop_by = by, by + UNPLANNED_STOP_TIMEOUT
            else:
                self._terminate()
        self._doing = Doing.STOPPING

    def _terminate(self) -> None:
        self._terminate_at = None
        if self._processes is not None:
            self._processes.signal(signal.SIGKILL if self._agreement.shielded() else signal.SIGTERM)

    def _all_ended(self) -> bool:
        return self._processes is None or self._processes.all_ended()

    def _stopped(self) -> RunResult | None:
        self._terminate_at = None
        self._close_round()
        return self._after_stop()

    def _close_round(self) -> None:
        self._last_checkpoint = self.last_checkpoint()
        if self._watchdog is not None:
            self._watchdog.unwatch()
        left: tuple[int, ...] = ()
        if self._processes is not None:
            self._processes.close(signal.SIGKILL)
            left = self._processes.left()
            self._processes = None
        self._reporter.count(sum(worker.boundary for worker in self.progress()))
        self._agreement.close_round()
        if left:
            # Another round here would train beside them, and nobody is to take this node for a healthy one.
            self._coordination.left(LeaveReason.FAILED)
            self.outcome = AgentOutcome(ExitCode.FAILED, detail=survivors(self._seat.node, left), gave_up=True)
            raise RendezvousGracefulExitError(self.outcome.detail)

    def _clear_away(self, number: signal.Signals, timeout: int) -> None:
        """See base class."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._reserved is not None:
            self._reserved.close()
        number = signal.SIGKILL if self._agreement.shielded() else number
        self._agreement.close()
        if self._processes is not None:
            self._processes.close(number, timeout)
            self._processes = None
