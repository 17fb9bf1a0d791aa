"""The elastic agent of one node: executes what its life cycle decides.

It sleeps until a worker ends, the leader sends a message, a signal comes or a deadline is due;
:mod:`slurm_elastic.agent.lifecycle` decides what follows.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from slurm_elastic.agent.event_log import Reached
from slurm_elastic.agent.features import EARLY, Feature, RunningRound
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.protocol import StartInterruptedError
from slurm_elastic.agent.forkserver.worker_processes import WorkerProcesses
from slurm_elastic.agent.job.preemption import LEAVE_REASONS, SignalDiagnosis
from slurm_elastic.agent.lifecycle import actions, events, machine, states
from slurm_elastic.agent.root_cause import last_output, told_elsewhere
from slurm_elastic.agent.settings import AgentSettings
from slurm_elastic.agent.signals import record_signals
from slurm_elastic.agent.workers.processes import survivors, worker_environment
from slurm_elastic.agent.workers.torch_agent import TorchAgent
from slurm_elastic.control.agent_side import RoundControl, WorkerProgress
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.membership.agents import STEPPED, WorkerFailure, root_of
from slurm_elastic.rendezvous.membership.events import Ended, Held, Interrupted, Leaving, WorkerFailed
from slurm_elastic.rendezvous.membership.stragglers import Collective, WorkerPosition
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.torch_handler import SlurmRendezvousHandler
from slurm_elastic.rendezvous.transport.messages import Assignment, LeaveRequested
from slurm_elastic.rendezvous.worker_store import FreshPorts, ReservedPort, open_worker_store

logger = logging.getLogger("slurm_elastic")

_DUMP_TIMEOUT = 0.15
"""Seconds for dumps that workers are writing when they are stopped: every wait ends within 0.2 s of a signal."""
_ANSWER_TIMEOUT = 0.5
"""Seconds for workers to say where they are when the leader asks: it takes 0.1 s with a full flight recorder."""
_MOST_POSITIONS = 4
"""Workers of a node of which the leader is told how far they are: it has to read the answers of all nodes."""
_CANNOT_RUN = 127
"""The exit code of a shell for a program that cannot be run, such as one whose interpreter is missing."""


class Agent:
    """One node's agent."""

    def __init__(
        self,
        settings: AgentSettings,
        rendezvous: RendezvousConfig,
        coordination: Coordination,
        fork_server: ForkServer,
        features: Sequence[Feature],
        directory: Path,
    ) -> None:
        config, shutdown_timeout = settings.launch_config, settings.values.shutdown_timeout
        logs_specs = config.logs_specs
        assert logs_specs is not None
        spec = _worker_spec(settings, SlurmRendezvousHandler(rendezvous, coordination))
        self.torch = TorchAgent(spec, logs_specs, self._run_main_loop, self._clean_up, shutdown_timeout)
        self._rendezvous_config, self._coordination = rendezvous, coordination
        self._start_processes = partial(
            WorkerProcesses,
            fork_server=fork_server,
            logs_specs=logs_specs,
            prefix_template=config.log_line_prefix_template,
            brief=settings.values.console == "brief",
        )
        self._notices, self._features = record_signals(), tuple(features)
        self.diagnosis = SignalDiagnosis(
            self._notices,
            settings.run_dir,
            settings.job,
            settings.agent,
            settings.values.meaning,
            self.last_checkpoint,
            self.newest_save,
        )
        self._worker_signal = settings.values.worker_signal
        self._config = states.LifecycleConfig(
            agent=rendezvous.agent,
            node=rendezvous.node,
            run_id=rendezvous.run_id,
            leader_host=rendezvous.leader_host,
            shutdown_timeout=shutdown_timeout,
            leave_margin=rendezvous.options.leave_margin,
            signals_workers=self._worker_signal is not None,
        )
        self._state: states.State = states.Joining()
        self._directory = directory
        self._control = RoundControl(directory, 0, 0)
        """The control pages of the newest round; none before the first."""
        self._processes: WorkerProcesses | None = None
        self.assignment: Assignment | None = None
        """The assignment of the present round; None before the first round and while the next one forms."""
        self._running: RunningRound
        self._ports = FreshPorts(rendezvous.address)
        self._reserved: ReservedPort | None = None
        self._result = RunResult(state=WorkerState.HEALTHY)
        self._round_end: Interrupted | Ended | None = None
        self._last_checkpoint: int | None = None
        self._newest_save: float | None = None
        self._started_at: float | None = None
        self._ran, self._worked, self._proven = 0.0, False, False
        coordination.positions = self._worker_positions

    def supervise(self) -> states.Done:
        """Take part in the run until it ends or this agent leaves."""
        try:
            self.torch.run(self.torch.spec.role)
        except BaseException:
            self.torch.record_end(succeeded=False)
            raise
        assert isinstance(self._state, states.Done)
        # torch's agent raises an exception when a signal comes, and returns when its workers fail.
        self.torch.record_end(succeeded=self._state.exit_code is not ExitCode.LEFT)
        return self._state

    def progress(self) -> tuple[WorkerProgress, ...]:
        """Return the progress of the workers of this node, by local rank; from any thread."""
        return self._control.progress()

    def last_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint that a worker here has reported, or None; from any thread."""
        steps = [worker.checkpoint for worker in self.progress() if worker.checkpoint is not None]
        return max(steps, default=self._last_checkpoint)

    def reached(self) -> Reached:
        """Return how far the workers of this node are, or were in the last round; from any thread."""
        steps = [worker.step for worker in self.progress() if worker.step is not None]
        nodes = None if self.assignment is None else self.assignment.nodes
        return Reached(max(steps, default=None), self.last_checkpoint(), nodes)

    def newest_save(self) -> float | None:
        """Return the seconds that the newest save of a worker here took; None if unknown; from any thread."""
        return max(
            (worker.save_time for worker in self.progress() if worker.save_time is not None), default=self._newest_save
        )

    # The main loop.

    def _run_main_loop(self) -> RunResult:
        self._show_state()
        self.diagnosis.start()
        self._handle(events.Started(signalled=self.diagnosis.has_news))
        while not isinstance(self._state, states.Done):
            self._wait()
            self._process_inputs()
        return self._torch_result(self._state)

    def _wait(self) -> None:
        due = states.deadline(self._state)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        fds = [self._coordination.fd, self._notices.fd, self.diagnosis.fd]
        fds += [feature.fd for feature in self._features if feature.fd is not None]
        if self._processes is not None:
            fds += self._processes.exit_fds()
        if isinstance(self._state, states.Stopping) and self._all_ended():
            # No descriptor tells of it any more.
            timeout = 0.0
        with selectors.DefaultSelector() as selector:
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(timeout)

    def _process_inputs(self) -> None:
        self._notices.drain()
        for feature in self._features:
            feature.loop_turned()
        # Signals first: under proctrack/linuxproc Slurm signals the workers at the same moment, and their end must not
        # count as a failure.
        self._check_signals()
        leader_event = self._coordination.next_event(timeout=0)
        if leader_event is not None:
            if isinstance(leader_event, Interrupted | Ended):
                self._round_end = leader_event
            elif isinstance(leader_event, LeaveRequested):
                self.diagnosis.note_request(leader_event.reason, leader_event.seconds)
            self._handle(leader_event)
        self._check_workers()
        due = states.deadline(self._state)
        if due is not None and time.monotonic() >= due:
            self._handle(events.DeadlineReached())

    def _check_signals(self) -> None:
        finding = self.diagnosis.check()
        if finding is not None:
            first = self._notices.first()
            interrupts = first is not None and first.signal is signal.SIGINT
            asked = self.diagnosis.is_asked
            self._handle(
                events.Signalled(LEAVE_REASONS[finding.cause], finding.detail, finding.seconds, asked, interrupts)
            )
        while (finding := self.diagnosis.next_finding()) is not None:
            for_job = self.diagnosis.tells_job(finding.cause)
            self._handle(events.Diagnosed(LEAVE_REASONS[finding.cause], finding.seconds, str(finding), for_job))

    def _check_workers(self) -> None:
        match self._state:
            case states.Training():
                self._result = self.torch.poll_workers(self._processes)
                if self._result.state is WorkerState.SUCCEEDED:
                    self._handle(events.WorkersSucceeded(agreed=any(worker.stopped for worker in self.progress())))
                elif self._result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                    self._handle(events.WorkersFailed())
            case states.Reported():
                # Unread, the exits of further workers would wake the agent for ever.
                self._all_ended()
            case states.Stopping() if self._all_ended():
                self._handle(events.WorkersEnded())

    def _all_ended(self) -> bool:
        return self._processes is None or self._processes.all_ended()

    def _has_other_input(self) -> bool:
        for feature in self._features:
            feature.loop_turned()
        return self._coordination.has_event or self.diagnosis.has_news

    def _handle(self, event: events.Event) -> None:
        """Let the life cycle decide about an event, execute its actions, and handle their results in the same way."""
        due = deque([event])
        while due:
            before = self._state
            self._state, decided = machine.step(self._config, before, due.popleft(), time.monotonic())
            if self._state is not before:
                self._show_state()
            for action in decided:
                result = self._execute(action)
                if result is not None:
                    due.append(result)

    def _show_state(self) -> None:
        for feature in self._features:
            feature.state_changed(self._state)

    # Actions.

    def _execute(self, action: actions.Action) -> events.Event | None:
        agent = self._rendezvous_config.agent
        match action:
            case actions.Join(ends_store):
                if ends_store:
                    self.torch.serve_store(None)
                self.assignment = None
                reserved = self._reserved = self._ports.reserve()
                inventory = next((copies for feature in self._features if (copies := feature.inventory())), "")
                ran = self._ran if self._worked else 0.0
                self._proven = self._proven or ran == STEPPED
                info = self._rendezvous_config.agent_info(reserved.port, inventory, ran, proven=self._proven)
                self._coordination.join(info)
            case actions.StartWorkers(assignment):
                return self._start(assignment)
            case actions.SignalWorkers():
                if self._processes is not None and self._worker_signal is not None:
                    self._processes.signal(self._worker_signal)
            case actions.Hold(round_):
                self._coordination.send(Held(agent, round_, self._control.hold()))
            case actions.StopAtStep(round_, at, reason, seconds):
                try:
                    self._control.stop_at(at, reason, seconds)
                except ValueError as error:
                    logger.warning("the workers do not stop at step %d of round %d: %s", at, round_, error)
                    self._coordination.send(Held(agent, round_, None))
                    return None
                for feature in self._features:
                    feature.stop_agreed(reason)
                return events.StepAccepted(at)
            case actions.Fence():
                self._control.fence()
            case actions.ExpectExits(unplanned):
                self._note_ran()
                self._control.await_answers(_DUMP_TIMEOUT)
                for feature in self._features:
                    feature.exits_expected(unplanned=unplanned)
            case actions.TerminateWorkers(interrupt):
                if self._processes is not None:
                    ending = signal.SIGKILL if self._control.shielded() else signal.SIGTERM
                    self._processes.signal(signal.SIGINT if interrupt else ending)
            case actions.CloseRound():
                return self._close_round()
            case actions.AnnounceLeave(reason, seconds):
                for feature in self._features:
                    feature.leave_announced(action)
                self._coordination.send(Leaving(agent, reason, seconds))
            case actions.Tell(message):
                self._coordination.send(message)
            case actions.ReportFailure():
                self._note_ran()
                failure = self._first_failure(self._result)
                self._worked = self._worked and (failure.consequence or self._ran == STEPPED)
                self._coordination.send(WorkerFailed(agent, self._running.assignment.round, failure))
            case actions.Log(text):
                logger.info("%s", text)
        return None

    def _start(self, assignment: Assignment) -> events.Event:
        assert self._reserved is not None
        self.assignment, self._worked, self._round_end = assignment, False, None
        self._result = RunResult(state=WorkerState.HEALTHY)
        self.diagnosis.learn_grace()
        self.torch.serve_store(open_worker_store(assignment, self._reserved))
        self.torch.describe_round(assignment)
        environments = {
            worker.local_rank: worker_environment(
                self.torch.spec, worker, assignment, self._rendezvous_config, os.environ
            )
            for worker in self.torch.workers
        }
        self._control = RoundControl(self._directory, assignment.round, len(environments))
        for local_rank, env in environments.items():
            env.update(self._control.environment(local_rank))
            self.torch.set_local_rank(env, local_rank)
        for feature in self._features:
            feature.round_formed(assignment, environments)
        try:
            self._processes = self._start_processes(self.torch.spec, environments, self._has_other_input)
        except StartInterruptedError:
            return events.StartInterrupted()
        except OSError as error:
            return events.StartFailed(self._failure(assignment, _CANNOT_RUN, str(error)))
        self._started_at = time.monotonic()
        pids = self._processes.pids()
        self._running = RunningRound(assignment, pids, environments, self._control.progress, self._control)
        self.torch.workers_started(pids)
        for feature in self._features:
            feature.workers_started(self._running)
        return events.WorkersStarted()

    def _first_failure(self, result: RunResult) -> WorkerFailure:
        if not result.failures:
            return self._failure(self._running.assignment, 1, "a worker cannot be stopped")
        failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
        return root_of([self._describe(rank, failure) for rank, failure in failures])

    def _failure(self, assignment: Assignment, exit_code: int, message: str) -> WorkerFailure:
        rendezvous = self._rendezvous_config
        return WorkerFailure(rendezvous.agent, rendezvous.node, assignment.place.base_rank, exit_code, message)

    def _describe(self, rank: int, failure: ProcessFailure) -> WorkerFailure:
        error_file = str(failure.error_file)
        log = self._processes.stderrs[failure.local_rank] if self._processes is not None else ""
        described = replace(
            self._failure(self._running.assignment, failure.exitcode, last_output(error_file, log)),
            rank=rank,
            error_file=error_file,
            log=log,
            ran=self._ran,
            script=self.torch.script,
        )
        for feature in self._features:
            described = feature.attribute(self._running, described, failure.pid)
        return described

    def _note_ran(self) -> None:
        """Note once for how long the workers of this round have run, and whether that shows that the round works."""
        if self._started_at is not None:
            seconds, progress = time.monotonic() - self._started_at, self.progress()
            reports = any(worker.attached for worker in progress)
            stepped = any(worker.boundary for worker in progress) if reports else seconds >= EARLY
            self._ran, self._worked = STEPPED if stepped else seconds, stepped or not reports
            self._started_at = None

    def _close_round(self) -> events.RoundClosed:
        self._last_checkpoint, self._newest_save = self.last_checkpoint(), self.newest_save()
        unended: tuple[int, ...] = ()
        if self._processes is not None:
            self._processes.leave_out(self._is_consequence)
            self._processes.close(signal.SIGKILL)
            unended = self._processes.unended
            self._processes = None
        for feature in self._features:
            feature.round_ended(self.progress())
        self._control.close()
        return events.RoundClosed(
            self._coordination.leads, survivors(self._rendezvous_config.node, unended) if unended else ""
        )

    def _is_consequence(self, local_rank: int, text: str) -> bool:
        """Return True if the last words of a worker tell no cause: the leader's line, or the root cause, tells it."""
        rank = self._running.assignment.place.base_rank + local_rank
        told = any(feature.tells_end(self._running.pids[local_rank]) for feature in self._features)
        return told or told_elsewhere(self._round_end, rank, text)

    # The end.

    def _torch_result(self, end: states.Done) -> RunResult:
        if end.exit_code is ExitCode.FINISHED and self._result.state is WorkerState.SUCCEEDED:
            return self._result
        if self.assignment is not None and end.exit_code is ExitCode.FAILED and not end.gave_up:
            return RunResult(state=WorkerState.FAILED, failures=self._result.failures)
        raise RendezvousGracefulExitError(end.detail or "the run has ended")

    def _clean_up(self, number: signal.Signals, timeout: int) -> None:
        for feature in self._features:
            feature.run_ended()
        if self._reserved is not None:
            self._reserved.close()
        number = signal.SIGKILL if self._control.shielded() else number
        self._control.close()
        if self._processes is not None:
            self._processes.close(number, timeout)
            self._processes = None

    def _worker_positions(self, dumps: bool) -> tuple[WorkerPosition, ...]:
        """Return how far the workers of this node are; from any thread."""
        if dumps:
            self._control.ask_workers()
            self._control.await_answers(_ANSWER_TIMEOUT)
        assignment = self.assignment
        return () if assignment is None else _positions(self.progress(), assignment.place.base_rank)


def _positions(progress: Sequence[WorkerProgress], base_rank: int) -> tuple[WorkerPosition, ...]:
    """Return the positions of workers: of those that are equally far the first; the slowest ones, and the fastest."""
    positions: dict[tuple[object, ...], WorkerPosition] = {}
    # Of several with as few steps, one that is in no collective holds up the others.
    for worker in sorted(
        progress, key=lambda worker: (worker.boundary, worker.in_collective is not False, worker.local_rank)
    ):
        if worker.attached or worker.answers:
            collectives = tuple(Collective(*fields) for fields in worker.collectives)
            rank = base_rank + worker.local_rank
            position = WorkerPosition(rank, worker.boundary, worker.in_collective, worker.place, collectives)
            positions.setdefault((worker.boundary, worker.in_collective, collectives), position)
    kept = tuple(positions.values())
    return kept if len(kept) <= _MOST_POSITIONS else (*kept[: _MOST_POSITIONS - 1], kept[-1])


def _worker_spec(settings: AgentSettings, handler: SlurmRendezvousHandler) -> WorkerSpec:
    config = settings.launch_config
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=settings.entrypoint,
        args=settings.args,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
