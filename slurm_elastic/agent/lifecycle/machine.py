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

from dataclasses import replace

from slurm_elastic.agent.lifecycle.actions import (
    Action,
    AnnounceLeave,
    AnswerHold,
    CloseRound,
    DescribeFailure,
    End,
    ExpectExits,
    Fence,
    Hold,
    Join,
    Log,
    NoteLeaveRequest,
    ReportFailure,
    ReportFinished,
    ReportLeft,
    RequestLeave,
    SignalWorkers,
    StartWorkers,
    StopAtStep,
    StopServingStore,
    TerminateWorkers,
)
from slurm_elastic.agent.lifecycle.events import (
    DeadlineReached,
    Diagnosed,
    Event,
    FailureDescribed,
    Held,
    RoundClosed,
    Signalled,
    Started,
    StartFailed,
    StartInterrupted,
    StepAccepted,
    StepRefused,
    WorkersEnded,
    WorkersFailed,
    WorkersStarted,
    WorkersSucceeded,
)
from slurm_elastic.agent.lifecycle.states import (
    ANSWER_TIMEOUT,
    AgentOutcome,
    Departure,
    Done,
    Ending,
    Joining,
    Leaving,
    LifecycleConfig,
    Lingering,
    Rejoin,
    Reported,
    Starting,
    State,
    Stopping,
    Then,
    Training,
    WorkersResult,
    depart,
    is_leaving,
    round_of,
    training_of,
    with_training,
)
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.election import events as leader_events
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.events import Outcome
from slurm_elastic.rendezvous.transport.messages import Assignment, LeaveRequested

UNPLANNED_STOP_TIMEOUT = 0.5
"""Seconds between SIGTERM and SIGKILL for workers whose group is broken: they block in a collective with a lost peer,
so their Python signal handlers do not run, and they cannot save."""

_UNPLANNED = frozenset({Reason.NODE_LOST, Reason.WORKER_FAILED})


Step = tuple[State, tuple[Action, ...]]

Notice = Signalled | Diagnosed | LeaveRequested
"""The events that make the agent leave."""


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
    if isinstance(event, Notice):
        return _notified(config, state, event, now)
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
        case leader_events.LeaderLost(why) if not is_leaving(state):
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


def _is_interrupted(state: State) -> bool:
    match state:
        case Leaving(departure=departure) | Stopping(then=Departure() as departure):
            return departure.interrupts
    return False


def _notified(config: LifecycleConfig, state: State, event: Notice, now: float) -> Step:
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    seconds = event.seconds
    match event:
        case Signalled(detail=detail):
            if is_leaving(state):
                return state, ()
            round_ = round_of(state)
            before = (Log(f"{config.node} got {detail}: leaving round {round_.round if round_ else '-'}"),)
            if seconds is not None:
                # Until Slurm has told the seconds, workers get no more than torchrun gives them.
                seconds = min(seconds, config.shutdown_timeout)
        case Diagnosed(reason, _, detail, for_job):
            before = (Log(f"{config.node} leaves: {detail}"),)
            after = (RequestLeave(reason, seconds, detail),) if for_job else ()
        case LeaveRequested(detail=detail):
            before = (NoteLeaveRequest(event),)
            if is_leaving(state) and seconds is None:
                return state, before
            before = (*before, Log(f"{config.node} leaves: {detail}"))
    left, actions = _leave(config, state, event, seconds, now)
    if isinstance(event, Signalled) and event.asked and isinstance(state, Training) and isinstance(left, Leaving):
        # What the leader is told is told to the scripts of all nodes, and at once: so let it be the cause.
        (announce, *_), training = actions, state
        assert isinstance(announce, AnnounceLeave)
        return replace(left, training=training, untold=announce, since=now), before
    # The announcement comes first. An agent without workers ends with it.
    return left, (*before, *actions[:1], *after, *actions[1:])


def _leave(config: LifecycleConfig, state: State, notice: Notice, seconds: float | None, now: float) -> Step:
    """Announce that this agent leaves, within `seconds`; again when more is known about it."""
    timeout = config.shutdown_timeout
    departure = depart(
        notice.reason,
        notice.detail or notice.reason.value,
        seconds,
        shutdown_timeout=timeout,
        margin=config.leave_margin,
        now=now,
    )
    interrupts = isinstance(notice, Signalled) and notice.interrupts
    departure = replace(departure, interrupts=interrupts or _is_interrupted(state))
    announce = AnnounceLeave(departure.reason, timeout if seconds is None else seconds, departure.detail)
    match state:
        case Training() | Leaving():
            # The leader asks all agents for a step at which their workers can stop, or ends the round at once.
            training, signal = _signal_workers(config, training_of(state))
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
    return Done(outcome, round_of(state)), (*before, End(outcome, result))


# One function for each state.


def _joining(config: LifecycleConfig, state: Joining, event: Event) -> Step:
    match event:
        case Started(signalled):
            return state, () if signalled else (Join(),)
        case Assignment():
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
    workers = training_of(state)
    match event:
        case messages.Holding(round_):
            workers, signal = _signal_workers(config, workers)
            return with_training(state, workers), (*signal, Hold(round_))
        case Held(round_, at):
            return state, (AnswerHold(round_, at),)
        case messages.Stopping():
            reason = event.detail if event.reason is Reason.NODE_LEFT and event.detail else event.reason.value
            return state, (StopAtStep(event.round, event.step, reason, event.seconds),)
        case StepAccepted(at):
            return with_training(state, replace(workers, stop_step=at)), ()
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
            return now >= state.since + ANSWER_TIMEOUT
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
    signalled = training_of(state).signalled if isinstance(state, Training | Leaving) else state.signalled
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
    signalled = training_of(state).signalled if isinstance(state, Training | Leaving) else state.signalled
    if signalled_first and signalled:
        stopping = Stopping(state.round, then, by + UNPLANNED_STOP_TIMEOUT, by, signalled)
        return stopping, (*before, ExpectExits(unplanned))
    interrupts = isinstance(then, Departure) and then.interrupts
    # As under torchrun a script can catch KeyboardInterrupt.
    stopping = Stopping(state.round, then, by, now + timeout / 2 if interrupts else None, signalled)
    return stopping, (*before, ExpectExits(unplanned), TerminateWorkers(interrupts))
