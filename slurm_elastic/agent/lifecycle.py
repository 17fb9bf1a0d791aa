"""The life cycle of one agent as a pure state machine: no I/O, no clock, no torch.

`step` takes a state, an event and the time, and returns the next state and the actions that carry the change out. The
shell, :mod:`slurm_elastic.agent.agent`, executes them. An action that has a result (start the workers, hold them, close
the round) reports it as an event before any other event is taken.

::

    Joining -> Starting -> Training -> Reported -> Stopping -> Joining
                              |            |          |
                              +-> Leaving -+----------+-> Lingering -> Done

An agent that has no workers ends at once: Joining -> Done.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous import leader_events
from slurm_elastic.rendezvous.leave_requests import LeaveRequested
from slurm_elastic.rendezvous.membership import LeaveReason, Outcome, Reason, WorkerFailure, seconds_to_stop
from slurm_elastic.rendezvous.transport import messages

UNPLANNED_STOP_TIMEOUT = 0.5
"""Seconds between SIGTERM and SIGKILL for workers whose group is broken: they block in a collective with a lost peer,
so their Python signal handlers do not run, and they cannot save."""

_ANSWER_TIMEOUT = 1.0
"""Seconds for which workers train on after a signal until Slurm has named its cause; an answer takes some 0.1 s."""
_OVERDUE_TIMEOUT = 2.0
"""Seconds that workers get if the deadline of a leave is past already: Slurm ends them, or the deadline was wrong."""
_UNPLANNED = frozenset({Reason.NODE_LOST, Reason.WORKER_FAILED})


@dataclass(frozen=True, slots=True)
class LifecycleConfig:
    """The settings of an agent that its life cycle depends on.

    Attributes:
        node: Slurm's name of this node, for log lines.
        run_id: The run's id, for log lines.
        leader_host: The host on which the first leader is expected, for log lines.
        shutdown_timeout: Seconds between SIGTERM and SIGKILL for workers whose round ends as planned.
        leave_margin: See :func:`~slurm_elastic.rendezvous.membership.seconds_to_stop`.
        signals_workers: True if workers are sent ``--worker-signal`` when a planned end of their round is announced.
    """

    node: str
    run_id: str
    leader_host: str
    shutdown_timeout: float
    leave_margin: float
    signals_workers: bool = False


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """The end of this agent.

    Attributes:
        exit_code: The exit code of the agent's process, for Slurm.
        failure: The run's root cause; None if the run did not fail.
        detail: One line for the log; empty for no line.
        gave_up: True if this agent ends alone and others may go on: it found no leader, lost the records, or could not
            end its workers.
        no_leader: True if it has reached no leader from its start until `join_timeout` was over.
    """

    exit_code: ExitCode
    failure: WorkerFailure | None = None
    detail: str = ""
    gave_up: bool = False
    no_leader: bool = False


class WorkersResult(enum.Enum):
    """The end of the workers of the last round here, for torch's own events and metrics."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()


# What a stop leads to.


@dataclass(frozen=True, slots=True)
class Rejoin:
    """After the stop the agent joins the next round."""


@dataclass(frozen=True, slots=True)
class Departure:
    """After the stop the agent leaves. Moments are own monotonic time in seconds.

    Attributes:
        reason: The reason of the leave.
        detail: The reason as text for people.
        stop_by: The time at which workers that have not stopped at an agreed step are terminated.
        gone_by: The time at which workers that have not ended are killed.
        interrupts: True if a person has interrupted the agent; its workers then get SIGINT before SIGTERM.
    """

    reason: LeaveReason
    detail: str
    stop_by: float
    gone_by: float
    interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """After the stop the agent ends, because the run has ended or because the agent gives up.

    Attributes:
        outcome: How the agent ends.
        result: How its workers ended; None if their end is no result.
    """

    outcome: AgentOutcome
    result: WorkersResult | None = None


Then = Rejoin | Departure | Ending


def depart(
    reason: LeaveReason, detail: str, seconds: float | None, *, shutdown_timeout: float, margin: float, now: float
) -> Departure:
    """Plan a leave.

    Args:
        reason: The reason of the leave.
        detail: The reason as text for people.
        seconds: Seconds until the agent has to end; None if unknown, then workers get `shutdown_timeout` in all.
        shutdown_timeout: Seconds for workers whose round ends as planned.
        margin: See :func:`~slurm_elastic.rendezvous.membership.seconds_to_stop`.
        now: The agent's own monotonic time in seconds.
    """
    if seconds is None:
        return Departure(reason, detail, now + seconds_to_stop(shutdown_timeout, margin), now + shutdown_timeout)
    stop_by = now + seconds_to_stop(seconds, margin)
    # The agent announces its end after its workers' end, and that takes a moment, too.
    gone_by = stop_by + 0.75 * (now + seconds - stop_by) if seconds > 0 else now + _OVERDUE_TIMEOUT
    return Departure(reason, detail, stop_by, gone_by)


# States.


@dataclass(frozen=True, slots=True)
class Joining:
    """The agent has no workers and waits for an assignment in the next round.

    Attributes:
        agreed: True if its workers of the last round stopped at the agreed step.
        spare: True once the leader has said that the round is full.
    """

    agreed: bool = False
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Starting:
    """The agent has an assignment, and its workers are being started."""

    round: messages.Assignment


@dataclass(frozen=True, slots=True)
class Training:
    """The workers run.

    Attributes:
        round: The assignment of this agent.
        stop_step: The step at which the workers were told to stop; None before.
        signalled: True after they were sent ``--worker-signal``.
    """

    round: messages.Assignment
    stop_step: int | None = None
    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The agent leaves. Its workers run until the agreed step, or until `departure.stop_by`.

    Attributes:
        training: The state of the workers.
        departure: The plan of the leave.
        untold: What the leader is told when Slurm has not named the cause in time; None once the leave is announced.
        since: The own monotonic time of the signal, while the leave is not announced.
    """

    training: Training
    departure: Departure
    untold: AnnounceLeave | None = None
    since: float = 0.0

    @property
    def round(self) -> messages.Assignment:
        """The assignment of this agent."""
        return self.training.round


@dataclass(frozen=True, slots=True)
class Reported:
    """The leader knows how the workers here ended, and decides what comes next.

    Attributes:
        round: The assignment of this agent.
        result: How the workers ended; None if their start was interrupted because an event was waiting.
        signalled: True if they were sent ``--worker-signal``.
    """

    round: messages.Assignment
    result: WorkersResult | None
    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """The workers are being stopped.

    Attributes:
        round: The assignment of this agent.
        then: What follows when the workers have ended.
        stop_by: The own monotonic time at which workers that still run are killed.
        terminate_at: The own monotonic time at which they get SIGTERM; None if they have got it, or get none.
        signalled: True if they were sent ``--worker-signal``.
        agreed: True if they have stopped at the agreed step.
    """

    round: messages.Assignment
    then: Then
    stop_by: float
    terminate_at: float | None = None
    signalled: bool = False
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class Lingering:
    """The workers have stopped at the agreed step, and the agent leaves when those of the other agents have stopped.

    Until then it serves their store, or leads.
    """

    round: messages.Assignment
    departure: Departure


@dataclass(frozen=True, slots=True)
class Done:
    """The agent has ended.

    Attributes:
        outcome: How the agent has ended.
        round: Its last assignment; None if it was waiting for one.
    """

    outcome: AgentOutcome
    round: messages.Assignment | None


State = Joining | Starting | Training | Leaving | Reported | Stopping | Lingering | Done

# Events. The leader's messages are events as they are.


@dataclass(frozen=True, slots=True)
class Started:
    """The agent begins. `signalled`: a signal that asks it to leave has come already."""

    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal asks the agent to leave.

    Attributes:
        reason: The presumed reason of the leave.
        detail: The name of the signal.
        seconds: Seconds until the agent has to end, at the least; None if unknown.
        asked: True if Slurm is being asked for the cause.
        interrupts: True if it is SIGINT.
    """

    reason: LeaveReason
    detail: str
    seconds: float | None = None
    asked: bool = False
    interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """The agent has found out why it was signalled, or that its job's time limit is near.

    Attributes:
        reason: The reason of the leave.
        seconds: Seconds until the agent has to end; None if unknown.
        detail: The reason as text for people.
        for_job: True if all agents of the job have to leave, and this one tells them.
    """

    reason: LeaveReason
    seconds: float | None
    detail: str
    for_job: bool = False


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    """Result of StartWorkers: the workers run."""


@dataclass(frozen=True, slots=True)
class StartInterrupted:
    """Result of StartWorkers: an event was waiting, and no worker was started."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Result of StartWorkers: the program cannot be run here."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class Held:
    """Result of Hold. `step` is the earliest step at which the workers can stop; None if they take no part."""

    round: int
    step: int | None


@dataclass(frozen=True, slots=True)
class StepAccepted:
    """Result of StopAtStep: the workers stop at this step."""

    step: int


@dataclass(frozen=True, slots=True)
class StepRefused:
    """Result of StopAtStep: the workers were not held, so they may be past the step."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkersSucceeded:
    """All workers ended with exit code 0. `agreed`: one of them was told to stop at the agreed step."""

    agreed: bool = False


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    """A worker failed while the agent was not stopping it."""


@dataclass(frozen=True, slots=True)
class FailureDescribed:
    """Result of DescribeFailure."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class WorkersEnded:
    """No worker runs any more."""


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Result of CloseRound.

    Attributes:
        leads: True if this agent leads the run.
        survivors: One line about processes that SIGKILL does not end; empty if there are none.
    """

    leads: bool = False
    survivors: str = ""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The time of `deadline` has come."""


Event = (
    Started
    | Signalled
    | Diagnosed
    | WorkersStarted
    | StartInterrupted
    | StartFailed
    | Held
    | StepAccepted
    | StepRefused
    | WorkersSucceeded
    | WorkersFailed
    | FailureDescribed
    | WorkersEnded
    | RoundClosed
    | DeadlineReached
    | leader_events.LeaderEvent
    | leader_events.RecordsLost
)

# Actions.


@dataclass(frozen=True, slots=True)
class Join:
    """Reserve a port for the next worker store, and ask the leader for an assignment."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Serve the worker store, if it is served here, and start the workers of a round.

    Results: WorkersStarted, StartInterrupted, StartFailed.
    """

    round: messages.Assignment


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send ``--worker-signal`` to the workers."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Let the workers wait before their next step. Result: Held."""

    round: int


@dataclass(frozen=True, slots=True)
class StopAtStep:
    """Tell the workers at which step to stop. Results: StepAccepted, StepRefused.

    Attributes:
        round: The number of the round.
        step: The stop step, counted in this round.
        reason: The reason that the training script gets.
        seconds: Seconds until the workers are killed; None for no limit.
    """

    round: int
    step: int
    reason: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Fence:
    """Forbid the workers to publish checkpoints: the run may go on without this agent."""


@dataclass(frozen=True, slots=True)
class ExpectExits:
    """The workers are about to be stopped: their end is no failure from now on.

    Attributes:
        unplanned: True if their round ends because a node was lost or a worker has failed.
    """

    unplanned: bool = False


@dataclass(frozen=True, slots=True)
class TerminateWorkers:
    """Send SIGTERM to the workers that still run, or with `interrupt` SIGINT."""

    interrupt: bool = False


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Kill whatever is left of the round's workers, and their output. Result: RoundClosed."""


@dataclass(frozen=True, slots=True)
class StopServingStore:
    """End the worker store of the last round, if it is served here."""


@dataclass(frozen=True, slots=True)
class AnnounceLeave:
    """Tell the leader that this agent will leave, `seconds` from now. `reason` says why, `detail` as text."""

    reason: LeaveReason
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class AnswerHold:
    """Tell the leader at which step the workers of a round can stop; None if they take no part."""

    round: int
    step: int | None


@dataclass(frozen=True, slots=True)
class ReportLeft:
    """Tell the leader that this agent leaves and has no workers. `stopped`: they have stopped at the agreed step."""

    reason: LeaveReason
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """Tell the leader that all workers here ended with exit code 0."""


@dataclass(frozen=True, slots=True)
class DescribeFailure:
    """Find out which worker failed first, with its traceback or last output. Result: FailureDescribed."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the leader about the failure of a worker that the agent was not stopping."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class RequestLeave:
    """Ask the leader to pass on to the other agents of this job that they have to leave."""

    reason: LeaveReason
    seconds: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class NoteLeaveRequest:
    """Note that the leader has asked this agent to leave, so that it does not ask Slurm why."""

    request: LeaveRequested


@dataclass(frozen=True, slots=True)
class Log:
    """Write one line to the log."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End the agent. `result` is what its workers' end counts as; None if they have no result."""

    outcome: AgentOutcome
    result: WorkersResult | None = None


Action = (
    Join
    | StartWorkers
    | SignalWorkers
    | Hold
    | StopAtStep
    | Fence
    | ExpectExits
    | TerminateWorkers
    | CloseRound
    | StopServingStore
    | AnnounceLeave
    | AnswerHold
    | ReportLeft
    | ReportFinished
    | DescribeFailure
    | ReportFailure
    | RequestLeave
    | NoteLeaveRequest
    | Log
    | End
)

Step = tuple[State, tuple[Action, ...]]


class WorkerWatch(enum.Enum):
    """The event of the worker processes that the shell watches for."""

    NOTHING = enum.auto()
    """No event: there are no workers."""
    RESULT = enum.auto()
    """All workers have succeeded, or one has failed."""
    EXITS = enum.auto()
    """No event, but the shell reads the exits of further workers: unread, they would wake it for ever."""
    END = enum.auto()
    """No worker runs any more."""


def worker_watch(state: State) -> WorkerWatch:
    """Return what the shell has to watch the worker processes for."""
    match state:
        case Training() | Leaving():
            return WorkerWatch.RESULT
        case Reported():
            return WorkerWatch.EXITS
        case Stopping():
            return WorkerWatch.END
        case _:
            return WorkerWatch.NOTHING


def deadline(state: State) -> float | None:
    """Return when DeadlineReached is due, in own monotonic time; None for never."""
    match state:
        case Stopping(stop_by=stop_by, terminate_at=terminate_at):
            return stop_by if terminate_at is None else min(stop_by, terminate_at)
        case Leaving(departure=departure, untold=AnnounceLeave(), since=since):
            return min(since + _ANSWER_TIMEOUT, departure.stop_by)
        case Leaving(departure=departure) | Lingering(departure=departure):
            return departure.stop_by
        case _:
            return None


def step(config: LifecycleConfig, state: State, event: Event, now: float) -> Step:
    """Decide what an event means to an agent in this state.

    Args:
        config: The settings of the agent.
        state: The state of the agent.
        event: The event that has happened.
        now: The agent's own monotonic time in seconds.

    Returns:
        The next state, and the actions to execute, in this order.
    """
    match state:
        case Done():
            return state, ()
        case Starting():
            return _starting(state, event)
        case Stopping(then=Ending()):
            # No event changes how the agent ends.
            return _stopping(config, state, event, now)
    ending = _ending(config, state, event)
    if ending is not None:
        return _end(state, ending, now)
    notice = _notice(event)
    if notice is not None:
        return _notified(config, state, notice, event, now)
    match state:
        case Joining():
            return _joining(config, state, event)
        case Training() | Leaving():
            return _training(config, state, event, now)
        case Reported():
            return _reported(config, state, event, now)
        case Stopping():
            return _stopping(config, state, event, now)
        case Lingering():
            return _lingering(state, event, now)
    return state, ()


# Events that end the agent in any state.


def _ending(config: LifecycleConfig, state: State, event: Event) -> Ending | None:
    match event:
        case messages.Ended():
            return _run_ended(state, event)
        case leader_events.LeaderLost(why) if not _is_leaving(state):
            # A leaving agent does not look for another leader.
            return _give_up(ExitCode.LEFT, f"the leader on {config.leader_host} is lost: {why}")
        case leader_events.Unreachable(why, usage):
            code = ExitCode.USAGE if usage else ExitCode.LEFT
            text = f"no leader of run {config.run_id} on {config.leader_host}: {why}"
            return _give_up(code, text, no_leader=not usage)
        case leader_events.RecordsLost(why):
            return _give_up(ExitCode.LEFT, why)
    return None


def _run_ended(state: State, ended: messages.Ended) -> Ending:
    succeeded = ended.outcome in (Outcome.SUCCEEDED, Outcome.CLOSED)
    has_round = not isinstance(state, Joining)
    code = ExitCode.FINISHED if succeeded else ExitCode.FAILED
    if ended.outcome is Outcome.TIMED_OUT and has_round:
        code = ExitCode.LEFT
    result: WorkersResult | None = None
    if not succeeded and has_round:
        result = WorkersResult.FAILED
    elif succeeded and isinstance(state, Reported) and state.result is WorkersResult.SUCCEEDED:
        result = WorkersResult.SUCCEEDED
    return Ending(AgentOutcome(code, ended.failure, ended.detail), result)


def _give_up(code: ExitCode, detail: str, *, no_leader: bool = False) -> Ending:
    return Ending(AgentOutcome(code, detail=detail, gave_up=True, no_leader=no_leader))


def _end(state: State, ending: Ending, now: float) -> Step:
    if isinstance(state, Training | Leaving | Reported | Stopping):
        fence = (Fence(),) if ending.outcome.gave_up else ()
        return _stop(state, ending, now, UNPLANNED_STOP_TIMEOUT, before=fence)
    return _done(state, ending.outcome, result=ending.result)


# Notices: events that make the agent leave.


@dataclass(frozen=True, slots=True)
class _Notice:
    reason: LeaveReason
    seconds: float | None
    detail: str


def _is_leaving(state: State) -> bool:
    return isinstance(state, Leaving | Lingering) or (isinstance(state, Stopping) and isinstance(state.then, Departure))


def _is_interrupted(state: State) -> bool:
    match state:
        case Leaving(departure=departure) | Stopping(then=Departure() as departure):
            return departure.interrupts
    return False


def _notice(event: Event) -> _Notice | None:
    """Return the notice that an event contains; None if it contains none."""
    match event:
        case (
            Signalled(reason, detail, seconds)
            | Diagnosed(reason, seconds, detail)
            | LeaveRequested(reason, seconds, detail)
        ):
            return _Notice(reason, seconds, detail)
    return None


def _notified(config: LifecycleConfig, state: State, notice: _Notice, event: Event, now: float) -> Step:
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    match event:
        case Signalled(detail=detail):
            if _is_leaving(state):
                return state, ()
            round_ = _round_of(state)
            before = (Log(f"{config.node} got {detail}: leaving round {round_.round if round_ else '-'}"),)
            if notice.seconds is not None:
                # Until Slurm has told the seconds, workers get no more than torchrun gives them.
                notice = replace(notice, seconds=min(notice.seconds, config.shutdown_timeout))
        case Diagnosed(reason, seconds, detail, for_job):
            before = (Log(f"{config.node} leaves: {detail}"),)
            after = (RequestLeave(reason, seconds, detail),) if for_job else ()
        case LeaveRequested(detail=detail):
            before = (NoteLeaveRequest(event),)
            if _is_leaving(state) and notice.seconds is None:
                return state, before
            before = (*before, Log(f"{config.node} leaves: {detail}"))
    interrupts = isinstance(event, Signalled) and event.interrupts
    left, actions = _leave(config, state, notice, now, interrupts=interrupts)
    if isinstance(event, Signalled) and event.asked and isinstance(state, Training) and isinstance(left, Leaving):
        # What the leader is told is told to the scripts of all nodes, and at once: so let it be the cause.
        (announce, *_), training = actions, state
        assert isinstance(announce, AnnounceLeave)
        return replace(left, training=training, untold=announce, since=now), before
    # The announcement comes first. An agent without workers ends with it.
    return left, (*before, *actions[:1], *after, *actions[1:])


def _leave(config: LifecycleConfig, state: State, notice: _Notice, now: float, *, interrupts: bool) -> Step:
    """Announce that this agent leaves; again when more is known about it."""
    timeout = config.shutdown_timeout
    departure = depart(
        notice.reason,
        notice.detail or notice.reason.value,
        notice.seconds,
        shutdown_timeout=timeout,
        margin=config.leave_margin,
        now=now,
    )
    departure = replace(departure, interrupts=interrupts or _is_interrupted(state))
    announce = AnnounceLeave(departure.reason, timeout if notice.seconds is None else notice.seconds, departure.detail)
    match state:
        case Training() | Leaving():
            # The leader asks all agents for a step at which their workers can stop, or ends the round at once.
            training, signal = _signal_workers(config, _training_of(state))
            return Leaving(training, departure), (announce, *signal)
        case Reported() | Stopping(then=Rejoin()):
            return _stop_to_leave(config, state, departure, now, before=(announce,))
        case Stopping(stop_by=stop_by):
            return replace(state, then=departure, stop_by=min(stop_by, departure.gone_by)), (announce,)
        case Lingering():
            return replace(state, departure=departure), (announce,)
        case Joining(agreed=agreed):
            return _left(state, departure, before=(announce, ReportLeft(departure.reason, stopped=agreed)))
    return state, ()


def _left(state: State, departure: Departure, *, before: tuple[Action, ...] = ()) -> Step:
    return _done(state, AgentOutcome(ExitCode.LEFT, detail=f"left after {departure.detail}"), before=before)


def _done(
    state: State, outcome: AgentOutcome, *, result: WorkersResult | None = None, before: tuple[Action, ...] = ()
) -> Step:
    return Done(outcome, _round_of(state)), (*before, End(outcome, result))


def _round_of(state: State) -> messages.Assignment | None:
    return None if isinstance(state, Joining) else state.round


# One function for each state.


def _joining(config: LifecycleConfig, state: Joining, event: Event) -> Step:
    match event:
        case Started(signalled):
            return state, () if signalled else (Join(),)
        case messages.Assignment():
            return Starting(event), (StartWorkers(event),)
        case messages.Waiting():
            return replace(state, spare=True), (Log(f"{config.node} waits as a spare"),)
    # An interruption may come twice, from two leaders or also from the connection: the workers have ended by then. A
    # second Join would give up an assignment that is on its way.
    return state, ()


def _starting(state: Starting, event: Event) -> Step:
    match event:
        case WorkersStarted():
            return Training(state.round), ()
        case StartInterrupted():
            return Reported(state.round, None), ()
        case StartFailed(failure):
            return Reported(state.round, WorkersResult.FAILED), (ReportFailure(failure),)
    return state, ()


def _training(config: LifecycleConfig, state: Training | Leaving, event: Event, now: float) -> Step:
    if isinstance(state, Leaving) and state.untold is not None and _ends_wait(state, event, now):
        training, signal = _signal_workers(config, state.training)
        announce = replace(state.untold, seconds=state.untold.seconds - (now - state.since))
        later, actions = _training(config, Leaving(training, state.departure), event, now)
        return later, (announce, *signal, *actions)
    workers = _training_of(state)
    match event:
        case messages.Holding(round_):
            workers, signal = _signal_workers(config, workers)
            return _with_training(state, workers), (*signal, Hold(round_))
        case Held(round_, at):
            return state, (AnswerHold(round_, at),)
        case messages.Stopping():
            reason = event.detail if event.reason is Reason.NODE_LEFT and event.detail else event.reason.value
            return state, (StopAtStep(event.round, event.step, reason, event.seconds),)
        case StepAccepted(at):
            return _with_training(state, replace(workers, stop_step=at)), ()
        case StepRefused(round_):
            return state, (AnswerHold(round_, None),)
        case WorkersSucceeded(agreed) if agreed or workers.signalled:
            # The workers have saved and ended at the agreed step, or because of the signal that was sent to them.
            then = state.departure if isinstance(state, Leaving) else Rejoin()
            return Stopping(workers.round, then, now, None, workers.signalled, agreed), (ExpectExits(), CloseRound())
    if isinstance(state, Leaving):
        return _training_until_leave(config, state, event, now)
    match event:
        case messages.Interrupted():
            return _interrupted(config, state, event, now)
        case WorkersSucceeded():
            return Reported(state.round, WorkersResult.SUCCEEDED, state.signalled), (ReportFinished(),)
        case WorkersFailed():
            return Reported(state.round, WorkersResult.FAILED, state.signalled), (DescribeFailure(),)
    return state, ()


def _ends_wait(state: Leaving, event: Event, now: float) -> bool:
    """Return True if an agent announces its leave now, without Slurm's answer."""
    match event:
        case WorkersSucceeded() | WorkersFailed() | messages.Interrupted() | leader_events.LeaderLost():
            return True
        case DeadlineReached():
            return now >= state.since + _ANSWER_TIMEOUT
    return False


def _training_until_leave(config: LifecycleConfig, state: Leaving, event: Event, now: float) -> Step:
    match event:
        case messages.Interrupted():
            # Slurm tells all agents of a job at the same moment, so each also learns that the others leave.
            return _stop_to_leave(config, state, state.departure, now, before=_fence(event))
        case leader_events.LeaderLost() if state.training.stop_step is None:
            return _stop_to_leave(config, state, state.departure, now)
        case WorkersSucceeded() | WorkersFailed():
            # Slurm may have signalled the workers, too: their end is neither a failure nor a success.
            return _stop_to_leave(config, state, state.departure, now)
        case DeadlineReached() if now >= state.departure.stop_by:
            return _stop_to_leave(config, state, state.departure, now)
    return state, ()


def _reported(config: LifecycleConfig, state: Reported, event: Event, now: float) -> Step:
    match event:
        case messages.Interrupted():
            return _interrupted(config, state, event, now)
        case messages.Holding(round_) if state.result is None:
            return state, (AnswerHold(round_, None),)
        case FailureDescribed(failure):
            return state, (ReportFailure(failure),)
    return state, ()


def _stopping(config: LifecycleConfig, state: Stopping, event: Event, now: float) -> Step:
    match event:
        case messages.Interrupted() if isinstance(state.then, Rejoin):
            return _interrupted(config, state, event, now)
        case messages.Interrupted():
            return state, _fence(event)
        case messages.Holding(round_):
            return state, (AnswerHold(round_, None),)
        case WorkersEnded():
            return replace(state, terminate_at=None), (CloseRound(),)
        case DeadlineReached() if now >= state.stop_by:
            return replace(state, terminate_at=None), (CloseRound(),)
        case DeadlineReached() if state.terminate_at is not None and now >= state.terminate_at:
            return replace(state, terminate_at=None), (TerminateWorkers(),)
        case RoundClosed():
            return _closed(state, event)
    return state, ()


def _closed(state: Stopping, closed: RoundClosed) -> Step:
    if closed.survivors:
        # Workers of another round here would train beside them, and the leader must not take this node for healthy.
        outcome = AgentOutcome(ExitCode.FAILED, detail=closed.survivors, gave_up=True)
        return _done(state, outcome, before=(ReportLeft(LeaveReason.FAILED),))
    match state.then:
        case Rejoin():
            # Workers on other nodes may still be saving; then the store is served until the next round.
            keeps_store = state.agreed or state.signalled
            return Joining(agreed=state.agreed), (Join(),) if keeps_store else (StopServingStore(), Join())
        case Departure() as departure:
            left = ReportLeft(departure.reason, stopped=state.agreed)
            others_stop = state.agreed and state.round.nodes > 1
            serves_store = state.round.place.rank == 0
            if others_stop and (serves_store or closed.leads):
                return Lingering(state.round, departure), (left,)
            return _left(state, departure, before=(left,))
        case Ending(outcome, result):
            return _done(state, outcome, result=result)


def _lingering(state: Lingering, event: Event, now: float) -> Step:
    match event:
        case messages.Interrupted() | leader_events.LeaderLost():
            return _left(state, state.departure)
        case DeadlineReached() if now >= state.departure.stop_by:
            return _left(state, state.departure)
    return state, ()


# How workers are stopped.


def _training_of(state: Training | Leaving) -> Training:
    return state.training if isinstance(state, Leaving) else state


def _with_training(state: Training | Leaving, workers: Training) -> Training | Leaving:
    return replace(state, training=workers) if isinstance(state, Leaving) else workers


def _signal_workers(config: LifecycleConfig, training: Training) -> tuple[Training, tuple[Action, ...]]:
    if not config.signals_workers or training.signalled:
        return training, ()
    return replace(training, signalled=True), (SignalWorkers(),)


def _fence(interrupted: messages.Interrupted) -> tuple[Action, ...]:
    return (Fence(),) if isinstance(interrupted, leader_events.CutOff) else ()


def _interrupted(
    config: LifecycleConfig, state: Training | Reported | Stopping, event: messages.Interrupted, now: float
) -> Step:
    unplanned = event.reason in _UNPLANNED
    timeout = UNPLANNED_STOP_TIMEOUT if unplanned else config.shutdown_timeout
    before = _fence(event)
    return _stop(state, Rejoin(), now, timeout, signalled_first=not unplanned, before=before, unplanned=unplanned)


def _stop_to_leave(
    config: LifecycleConfig,
    state: Training | Leaving | Reported | Stopping,
    departure: Departure,
    now: float,
    *,
    before: tuple[Action, ...] = (),
) -> Step:
    """Stop the workers of an agent that has announced its leave, without waiting for the agreed step."""
    if isinstance(state, Training | Leaving):
        # The workers of the other agents cannot agree with these.
        before = (*before, AnswerHold(state.round.round, None))
    signalled = _training_of(state).signalled if isinstance(state, Training | Leaving) else state.signalled
    signalled_first = signalled and now < departure.stop_by
    by = departure.stop_by if signalled_first else min(now + config.shutdown_timeout, departure.gone_by)
    return _stop(state, departure, now, by - now, signalled_first=signalled_first, before=before)


def _stop(
    state: Training | Leaving | Reported | Stopping,
    then: Then,
    now: float,
    timeout: float,
    *,
    signalled_first: bool = False,
    before: tuple[Action, ...] = (),
    unplanned: bool = False,
) -> Step:
    """Stop the workers within `timeout` seconds.

    Args:
        state: The state of the agent.
        then: What follows when the workers have ended.
        now: The agent's own monotonic time in seconds.
        timeout: Seconds between SIGTERM and SIGKILL.
        signalled_first: True if workers that were sent ``--worker-signal`` get `timeout` before SIGTERM.
        before: Actions to execute first.
        unplanned: True if a node was lost or a worker has failed.
    """
    by = now + timeout
    if isinstance(state, Stopping):
        return replace(state, then=then, stop_by=min(state.stop_by, by)), before
    signalled = _training_of(state).signalled if isinstance(state, Training | Leaving) else state.signalled
    if signalled_first and signalled:
        stopping = Stopping(state.round, then, by + UNPLANNED_STOP_TIMEOUT, by, signalled)
        return stopping, (*before, ExpectExits(unplanned))
    interrupts = isinstance(then, Departure) and then.interrupts
    # As under torchrun a script can catch KeyboardInterrupt.
    stopping = Stopping(state.round, then, by, now + timeout / 2 if interrupts else None, signalled)
    return stopping, (*before, ExpectExits(unplanned), TerminateWorkers(interrupts))
