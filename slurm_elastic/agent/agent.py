"""The elastic agent of one node: executes what its life cycle decides.

torch's agent polls ten times a second and restarts only when its own workers fail. This one sleeps until a worker ends,
the leader says something, a signal comes or a deadline is due; :mod:`slurm_elastic.agent.lifecycle` decides what that
means.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import time
from collections import deque
from collections.abc import Sequence

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.forkserver import StartInterruptedError
from slurm_elastic.agent.lifecycle import (
    Action,
    AgentOutcome,
    AnnounceLeave,
    AnswerHold,
    CloseRound,
    DeadlineReached,
    DescribeFailure,
    Diagnosed,
    End,
    Event,
    ExpectExits,
    FailureDescribed,
    Fence,
    Held,
    Hold,
    Join,
    Joining,
    LifecycleConfig,
    Log,
    NoteLeaveRequest,
    ReportFailure,
    ReportFinished,
    RequestLeave,
    RoundClosed,
    SayLeft,
    Signalled,
    SignalWorkers,
    Started,
    StartFailed,
    StartGivenUp,
    StartWorkers,
    State,
    StepAccepted,
    StepRefused,
    StopAtStep,
    StopServingStore,
    TerminateWorkers,
    WorkersEnded,
    WorkersFailed,
    WorkersResult,
    WorkersStarted,
    WorkersSucceeded,
    WorkerWatch,
    deadline,
    step,
    worker_watch,
)
from slurm_elastic.agent.preemption import SignalDiagnosis, concerns_job, leave_reason, requested_cause
from slurm_elastic.agent.root_cause import last_words
from slurm_elastic.agent.scratch_dir import NodeDirectory
from slurm_elastic.agent.signals import Notices
from slurm_elastic.agent.torch_agent import TorchAgent
from slurm_elastic.agent.worker_env import worker_environment
from slurm_elastic.agent.worker_processes import Starter, WorkerProcesses, survivors
from slurm_elastic.control import Agreement, RoundControl, WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.identity import job_of
from slurm_elastic.rendezvous.membership import Slowest, WorkerFailure, root_of
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rendezvous.worker_store import FreshPorts, ReservedPort, open_worker_store

__all__ = ["Agent"]

logger = logging.getLogger("slurm_elastic")

_CANNOT_RUN = 127
"""The exit code of a shell for a program that cannot be run, such as one whose interpreter is missing."""


class Agent:
    """One node's agent.

    Args:
        spec: torch's description of the workers.
        logs_specs: where their output goes.
        rendezvous: the identity of this agent, and the run it belongs to.
        coordination: the connection to the leader, made or being made.
        notices: the signals that came so far.
        diagnosis: finds out why they came.
        starter: starts the processes of a round.
        features: called in this order.
        shutdown_timeout: seconds that workers get between SIGTERM and SIGKILL when a round ends as planned.
        worker_signal: sent to workers when a planned end of their round is announced; None for none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        rendezvous: RendezvousConfig,
        coordination: Coordination,
        notices: Notices,
        diagnosis: SignalDiagnosis,
        starter: Starter,
        features: Sequence[Feature] = (),
        *,
        shutdown_timeout: int = 30,
        worker_signal: signal.Signals | None = None,
    ) -> None:
        self.torch = TorchAgent(spec, logs_specs, self._take_part, self._clean_up, shutdown_timeout)
        self._rendezvous_config, self._coordination, self._starter = rendezvous, coordination, starter
        self._notices, self._diagnosis, self._features = notices, diagnosis, tuple(features)
        self._worker_signal = worker_signal
        self._config = LifecycleConfig(
            node=rendezvous.node,
            run_id=rendezvous.run_id,
            leader_host=rendezvous.leader_host,
            shutdown_timeout=shutdown_timeout,
            leave_margin=rendezvous.options.leave_margin,
            signals_workers=worker_signal is not None,
        )
        self._state: State = Joining()
        self._directory = _control_directory()
        self._control: RoundControl | None = None
        self._agreement = Agreement(())
        self._processes: WorkerProcesses | None = None
        self._placed: Assignment | None = None
        self._ports = FreshPorts(rendezvous.address)
        self._reserved: ReservedPort | None = None
        self._result = RunResult(state=WorkerState.HEALTHY)
        self._end: End | None = None
        self._last_checkpoint: int | None = None
        coordination.slowest = self._slowest

    def supervise(self) -> AgentOutcome:
        """Take part in the run until it ends or this agent leaves."""
        try:
            self.torch.run(self.torch.spec.role)
        except BaseException:
            self.torch.record_end(succeeded=False)
            raise
        outcome = AgentOutcome(ExitCode.FAILED) if self._end is None else self._end.outcome
        # torch's agent ends by an exception when a signal comes; that of workers that fail ends well.
        self.torch.record_end(succeeded=outcome.exit_code is not ExitCode.LEFT)
        return outcome

    def progress(self) -> tuple[WorkerProgress, ...]:
        """Return how far the workers here are, by local rank; from any thread."""
        return self._agreement.progress()

    @property
    def last_place(self) -> Assignment | None:
        """The place in the round that runs here or ran last, None before the first and while the next one forms."""
        return self._placed

    def last_checkpoint(self) -> int | None:
        """Return the newest checkpoint that a worker here has reported, None if none did; from any thread."""
        steps = [worker.checkpoint for worker in self.progress() if worker.checkpoint is not None]
        return max(steps, default=self._last_checkpoint)

    # The main loop.

    def _take_part(self) -> RunResult:
        self._show_state()
        self._happened(Started(signalled=self._notices.first() is not None))
        while self._end is None:
            self._sleep()
            self._turn()
        return self._torch_result(self._end)

    def _sleep(self) -> None:
        watch, due = worker_watch(self._state), deadline(self._state)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        fds = [self._coordination.fd, self._notices.fd, self._diagnosis.fd]
        fds += [feature.fd for feature in self._features if feature.fd is not None]
        if watch is WorkerWatch.END:
            timeout = 0.0 if self._all_ended() else timeout
            fds += self._processes.running_fds() if self._processes is not None else []
        elif self._processes is not None:
            fds += self._processes.exit_fds()
        with selectors.DefaultSelector() as selector:
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(timeout)

    def _turn(self) -> None:
        self._notices.drain()
        for feature in self._features:
            feature.loop_turned()
        # Signals first: under proctrack/linuxproc Slurm signals the workers in the same moment, and their end must
        # not be mistaken for a failure.
        self._look_at_signals()
        word = self._coordination.next_event(timeout=0)
        if word is not None:
            self._happened(word)
        self._look_at_workers()
        due = deadline(self._state)
        if due is not None and time.monotonic() >= due:
            self._happened(DeadlineReached())

    def _look_at_signals(self) -> None:
        finding = self._diagnosis.look()
        if finding is not None:
            self._happened(Signalled(leave_reason(finding.cause), finding.detail))
        while (finding := self._diagnosis.news()) is not None:
            for_job = self._diagnosis.asks and concerns_job(finding.cause)
            self._happened(Diagnosed(leave_reason(finding.cause), finding.seconds, str(finding), for_job))

    def _look_at_workers(self) -> None:
        match worker_watch(self._state):
            case WorkerWatch.RESULT:
                self._result = self.torch.poll_workers(self._processes)
                if self._result.state is WorkerState.SUCCEEDED:
                    self._happened(WorkersSucceeded(agreed=any(worker.stopped for worker in self.progress())))
                elif self._result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                    self._happened(WorkersFailed())
            case WorkerWatch.REST:
                self._all_ended()
            case WorkerWatch.END if self._all_ended():
                self._happened(WorkersEnded())

    def _all_ended(self) -> bool:
        return self._processes is None or self._processes.all_ended()

    def _something_else_came(self) -> bool:
        for feature in self._features:
            feature.loop_turned()
        words, _, _ = select.select([self._coordination.fd], [], [], 0)
        return bool(words) or self._notices.first() is not None

    def _happened(self, event: Event) -> None:
        """Decide, execute, and go on with the results of what was executed."""
        events = deque([event])
        while events:
            before = self._state
            self._state, actions = step(self._config, before, events.popleft(), time.monotonic())
            if self._state is not before:
                self._show_state()
            for action in actions:
                result = self._execute(action)
                if result is not None:
                    events.append(result)

    def _show_state(self) -> None:
        for feature in self._features:
            feature.state_changed(self._state)

    # Actions.

    def _execute(self, action: Action) -> Event | None:
        match action:
            case Join():
                self._placed = None
                self._reserved = self._ports.reserve()
                inventory = next((held for feature in self._features if (held := feature.inventory())), "")
                reserved = self._reserved
                self._coordination.join(
                    self._rendezvous_config.agent_info(reserved.port, reserved.addresses, inventory)
                )
            case StartWorkers(placed):
                return self._start(placed)
            case SignalWorkers():
                if self._processes is not None and self._worker_signal is not None:
                    self._processes.signal(self._worker_signal)
            case Hold(round_):
                return Held(round_, self._agreement.hold())
            case StopAtStep(round_, at, reason, seconds):
                try:
                    self._agreement.stop_at(at, reason, seconds)
                except ValueError as error:
                    logger.warning("the workers do not stop at step %d of round %d: %s", at, round_, error)
                    return StepRefused(round_)
                return StepAccepted(at)
            case Fence():
                self._agreement.fence()
            case ExpectExits():
                for feature in self._features:
                    feature.exits_expected()
            case TerminateWorkers():
                if self._processes is not None:
                    self._processes.signal(signal.SIGKILL if self._agreement.shielded() else signal.SIGTERM)
            case CloseRound():
                return self._close_round()
            case StopServingStore():
                self.torch.serve_store(None)
            case AnnounceLeave(reason, seconds):
                for feature in self._features:
                    feature.leave_announced(action)
                self._coordination.leaving(reason, seconds)
            case AnswerHold(round_, at):
                self._coordination.held(round_, at)
            case SayLeft(reason, stopped):
                self._coordination.left(reason, stopped=stopped)
            case ReportFinished():
                self.torch.set_state(self._result.state)
                logger.debug("the workers of %s have ended well; it waits for the others", self._rendezvous_config.node)
                self._coordination.finished()
            case DescribeFailure():
                self.torch.set_state(self._result.state)
                return FailureDescribed(self._first_failure(self._result))
            case ReportFailure(failure):
                self._coordination.worker_failed(failure)
            case RequestLeave(reason, left, detail):
                self._coordination.request_leave(job_of(self._rendezvous_config.agent), reason, left, detail)
            case NoteLeaveRequest(request):
                self._diagnosis.told(None if request.seconds is not None else requested_cause(request.reason))
            case Log(text):
                logger.info("%s", text)
            case End():
                self._end = action
        return None

    def _start(self, placed: Assignment) -> Event:
        assert self._reserved is not None
        self._placed = placed
        self.torch.serve_store(open_worker_store(placed, self._reserved))
        self.torch.describe_round(placed)
        environments = {
            worker.local_rank: worker_environment(self.torch.spec, worker, placed, self._rendezvous_config, os.environ)
            for worker in self.torch.workers
        }
        if self._directory is not None:
            self._agreement = self._control = RoundControl(self._directory.path, placed.round, len(environments))
        for local_rank, env in environments.items():
            if self._control is not None:
                env.update(self._control.environment(local_rank))
            self.torch.set_local_rank(env, local_rank)
        for feature in self._features:
            feature.round_formed(placed, environments)
        try:
            self._processes = self._starter(self.torch.spec, environments, self._something_else_came)
        except StartInterruptedError:
            return StartGivenUp()
        except OSError as error:
            rendezvous = self._rendezvous_config
            return StartFailed(
                WorkerFailure(rendezvous.agent, rendezvous.node, placed.place.base_rank, _CANNOT_RUN, str(error))
            )
        pids = self._processes.pids()
        running = RunningRound(placed, pids, environments, self.progress)
        self.torch.workers_started(pids)
        for feature in self._features:
            feature.workers_started(running)
        return WorkersStarted()

    def _first_failure(self, result: RunResult) -> WorkerFailure:
        assert self._placed is not None
        rendezvous = self._rendezvous_config
        if not result.failures:
            return WorkerFailure(
                rendezvous.agent, rendezvous.node, self._placed.place.base_rank, 1, "a worker cannot be stopped"
            )
        failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
        return root_of([self._described(rank, failure) for rank, failure in failures])

    def _described(self, rank: int, failure: ProcessFailure) -> WorkerFailure:
        rendezvous = self._rendezvous_config
        log = self._processes.stderr_of(failure.local_rank) if self._processes is not None else ""
        described = WorkerFailure(
            agent=rendezvous.agent,
            node=rendezvous.node,
            rank=rank,
            exit_code=failure.exitcode,
            message=last_words(str(failure.error_file), log),
            error_file=str(failure.error_file),
            log=log,
        )
        for feature in self._features:
            described = feature.attribute(described, failure.pid)
        return described

    def _close_round(self) -> RoundClosed:
        self._last_checkpoint = self.last_checkpoint()
        left: tuple[int, ...] = ()
        if self._processes is not None:
            self._processes.close(signal.SIGKILL)
            left = self._processes.left()
            self._processes = None
        for feature in self._features:
            feature.round_ended(self.progress())
        if self._control is not None:
            self._control.close()
        return RoundClosed(self._coordination.leads, survivors(self._rendezvous_config.node, left) if left else "")

    # The end.

    def _torch_result(self, end: End) -> RunResult:
        if end.result is WorkersResult.SUCCEEDED:
            return self._result
        if end.result is WorkersResult.FAILED:
            return RunResult(state=WorkerState.FAILED, failures=self._result.failures)
        raise RendezvousGracefulExitError(end.outcome.detail or "the run has ended")

    def _clean_up(self, number: signal.Signals, timeout: int) -> None:
        for feature in self._features:
            feature.run_ended()
        if self._reserved is not None:
            self._reserved.close()
        number = signal.SIGKILL if self._agreement.shielded() else number
        if self._control is not None:
            self._control.close()
        if self._directory is not None:
            self._directory.close()
        if self._processes is not None:
            self._processes.close(number, timeout)
            self._processes = None

    def _slowest(self) -> Slowest | None:
        """Return the worker here that has taken the fewest steps of its round, None if none tells; from any thread."""
        placed = self._placed
        steps = [(worker.boundary, worker.local_rank) for worker in self.progress() if worker.attached]
        if placed is None or not steps:
            return None
        taken, local_rank = min(steps)
        return Slowest(placed.place.base_rank + local_rank, taken)


def _control_directory() -> NodeDirectory | None:
    """Make the directory of the pages through which workers are asked to stop at a step; None if it cannot be made."""
    try:
        return NodeDirectory("control")
    except OSError as error:
        logger.warning("workers cannot be asked to stop at a step: no directory for control pages: %s", error)
        return None
