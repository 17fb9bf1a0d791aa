"""The life cycle of one agent as a pure state machine: no I/O, no clock, no torch.

`step` takes a state, an event and the time, and returns the next state and the actions that carry the change out. The
shell, :mod:`slurm_elastic.agent.agent`, executes them. An action that has a result (start the workers, tell them a
step, close the round) reports it as an event before any other event is taken.

::

    Joining -> Starting -> Training -> Reported -> Stopping -> Joining
                              |                      ^  |
                              +----------------------+  +-> Lingering -> Done

An agent that has no workers ends at once: Joining -> Done.
"""

from __future__ import annotations

from dataclasses import replace

from slurm_elastic.agent.lifecycle import actions, events, states
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.election import events as leader_events
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason, job_of
from slurm_elastic.rendezvous.membership.events import Outcome
from slurm_elastic.rendezvous.transport.messages import Assignment, LeaveRequest, LeaveRequested

UNPLANNED_STOP_TIMEOUT = 0.5
"""Seconds between SIGTERM and SIGKILL for workers whose group is broken: they block in a collective with a lost peer,
so their Python signal handlers do not run, and they cannot save."""

_UNPLANNED = frozenset({Reason.NODE_LOST, Reason.WORKER_FAILED})


Step = tuple[states.State, tuple[actions.Action, ...]]

Notice = events.Signalled | events.Diagnosed | LeaveRequested
"""The events that make the agent leave."""


def step(config: states.LifecycleConfig, state: states.State, event: events.Event, now: float) -> Step:
    """Decide what an event means to an agent in this state.

    Args:
        now: The agent's own monotonic time in seconds.
    """
    match state:
        case states.Done():
            return state, ()
        case states.Starting():
            return _starting(config, state, event)
        case states.Stopping(then=states.Done()):
            # No event changes how the agent ends.
            return _stopping(config, state, event, now)
    ending = _ending(config, state, event)
    if ending is not None:
        return _end(state, ending, now)
    if isinstance(event, Notice):
        return _notified(config, state, event, now)
    match state:
        case states.Joining():
            return _joining(config, state, event)
        case states.Training():
            return _training(config, state, event, now)
        case states.Reported():
            return _reported(config, state, event, now)
        case states.Stopping():
            return _stopping(config, state, event, now)
        case states.Lingering():
            return _lingering(state, event, now)
    return state, ()


# Events that end the agent in any state.


def _ending(config: states.LifecycleConfig, state: states.State, event: events.Event) -> states.Done | None:
    match event:
        case messages.Ended():
            code = ExitCode.FINISHED if event.outcome in (Outcome.SUCCEEDED, Outcome.CLOSED) else ExitCode.FAILED
            if event.outcome is Outcome.TIMED_OUT and not isinstance(state, states.Joining):
                code = ExitCode.LEFT
            return states.Done(code, event.failure, event.detail)
        case leader_events.LeaderLost(why) if states.departure_of(state) is None:
            # A leaving agent does not look for another leader.
            return _give_up(ExitCode.LEFT, f"the leader on {config.leader_host} is lost: {why}")
        case leader_events.Unreachable(why, usage):
            code = ExitCode.USAGE if usage else ExitCode.LEFT
            text = f"no leader of run {config.run_id} on {config.leader_host}: {why}"
            return _give_up(code, text, no_leader=not usage)
        case leader_events.RecordsLost(why):
            return _give_up(ExitCode.LEFT, why)
    return None


def _give_up(code: ExitCode, detail: str, *, no_leader: bool = False) -> states.Done:
    return states.Done(code, detail=detail, gave_up=True, no_leader=no_leader)


def _end(state: states.State, ending: states.Done, now: float) -> Step:
    if isinstance(state, states.Training | states.Reported | states.Stopping):
        fence = (actions.Fence(),) if ending.gave_up else ()
        return _stop(state, ending, now, UNPLANNED_STOP_TIMEOUT, before=fence)
    return ending, ()


# Notices: events that make the agent leave.


def _notified(config: states.LifecycleConfig, state: states.State, event: Notice, now: float) -> Step:
    before: tuple[actions.Action, ...] = ()
    after: tuple[actions.Action, ...] = ()
    seconds = event.seconds
    match event:
        case events.Signalled(detail=detail):
            if states.departure_of(state) is not None:
                return state, ()
            round_ = (
                state.round.round if isinstance(state, states.Training | states.Reported | states.Stopping) else "-"
            )
            before = (actions.Log(f"{config.node} got {detail}: leaving round {round_}"),)
            if seconds is not None:
                # Until Slurm has told the seconds, workers get no more than torchrun gives them.
                seconds = min(seconds, config.shutdown_timeout)
        case events.Diagnosed(reason, _, detail, for_job):
            before = (actions.Log(f"{config.node} leaves: {detail}"),)
            request = LeaveRequest(config.agent, (), job_of(config.agent), reason, seconds, detail)
            after = (actions.Tell(request),) if for_job else ()
        case LeaveRequested(detail=detail):
            if states.departure_of(state) is not None and seconds is None:
                return state, ()
            before = (actions.Log(f"{config.node} leaves: {detail}"),)
    left, decided = _leave(config, state, event, seconds, now)
    if isinstance(event, events.Signalled) and event.asked and isinstance(state, states.Training):
        # What the leader is told is told to the scripts of all nodes, and at once: so let it be the cause.
        announce, *_ = decided
        assert isinstance(announce, actions.AnnounceLeave)
        return replace(state, departure=states.departure_of(left), untold=announce, since=now), before
    # The announcement comes first. An agent without workers ends with it.
    return left, (*before, *decided[:1], *after, *decided[1:])


def _leave(
    config: states.LifecycleConfig, state: states.State, notice: Notice, seconds: float | None, now: float
) -> Step:
    """Announce that this agent leaves, within `seconds`; again when more is known about it."""
    departure = states.depart(config, notice.reason, notice.detail or notice.reason.value, seconds, now)
    interrupts = isinstance(notice, events.Signalled) and notice.interrupts
    earlier = states.departure_of(state)
    departure = replace(departure, interrupts=interrupts or (earlier is not None and earlier.interrupts))
    announce = actions.AnnounceLeave(
        departure.reason, config.shutdown_timeout if seconds is None else seconds, departure.detail
    )
    match state:
        case states.Training():
            # The leader asks all agents for a step at which their workers can stop, or ends the round at once.
            training, signal = _signal_workers(config, state)
            return replace(training, departure=departure, untold=None), (announce, *signal)
        case states.Reported() | states.Stopping(then=states.Rejoin()):
            return _stop_to_leave(config, state, departure, now, before=(announce,))
        case states.Stopping(stop_by=stop_by):
            return replace(state, then=departure, stop_by=min(stop_by, departure.gone_by)), (announce,)
        case states.Lingering():
            return replace(state, departure=departure), (announce,)
        case states.Joining(agreed=agreed):
            return _left(departure), (announce, _tell_left(config, departure.reason, stopped=agreed))
    return state, ()


def _left(departure: states.Departure) -> states.Done:
    return states.Done(ExitCode.LEFT, detail=f"left after {departure.detail}")


def _tell_left(config: states.LifecycleConfig, reason: LeaveReason, *, stopped: bool = False) -> actions.Tell:
    return actions.Tell(messages.Left(config.agent, reason, stopped))


def _refuse(config: states.LifecycleConfig, round_: int) -> actions.Tell:
    """Tell the leader that the workers here take no part in the planned stop of a round."""
    return actions.Tell(messages.Held(config.agent, round_, None))


# One function for each state.


def _joining(config: states.LifecycleConfig, state: states.Joining, event: events.Event) -> Step:
    match event:
        case events.Started(signalled):
            return state, () if signalled else (actions.Join(),)
        case Assignment():
            return states.Starting(event), (actions.StartWorkers(event),)
        case messages.Waiting():
            return replace(state, spare=True), (actions.Log(f"{config.node} waits as a spare"),)
    # An interruption may come twice, from two leaders or also from the connection: the workers have ended by then. A
    # second Join would give up an assignment that is on its way.
    return state, ()


def _starting(config: states.LifecycleConfig, state: states.Starting, event: events.Event) -> Step:
    match event:
        case events.WorkersStarted():
            return states.Training(state.round), ()
        case events.StartInterrupted():
            return states.Reported(state.round, None), ()
        case events.StartFailed(failure):
            failed = messages.WorkerFailed(config.agent, state.round.round, failure)
            return states.Reported(state.round, succeeded=False), (actions.Tell(failed),)
    return state, ()


def _training(config: states.LifecycleConfig, state: states.Training, event: events.Event, now: float) -> Step:
    if state.untold is not None and _ends_wait(state, event, now):
        training, signal = _signal_workers(config, state)
        announce = replace(state.untold, seconds=state.untold.seconds - (now - state.since))
        later, decided = _training(config, replace(training, untold=None), event, now)
        return later, (announce, *signal, *decided)
    match event:
        case messages.Holding(round_):
            training, signal = _signal_workers(config, state)
            return training, (*signal, actions.Hold(round_))
        case messages.Stopping():
            reason = event.detail if event.reason is Reason.NODE_LEFT and event.detail else event.reason.value
            return state, (actions.StopAtStep(event.round, event.step, reason, event.seconds),)
        case events.StepAccepted(at):
            return replace(state, stop_step=at), ()
        case events.WorkersSucceeded(agreed) if agreed or state.signalled:
            # The workers have saved and ended at the agreed step, or because of the signal that was sent to them.
            then = state.departure or states.Rejoin()
            return states.Stopping(state.round, then, now, None, state.signalled, agreed), (
                actions.ExpectExits(),
                actions.CloseRound(),
            )
    if state.departure is not None:
        return _training_until_leave(config, state, state.departure, event, now)
    match event:
        case messages.Interrupted():
            return _interrupted(config, state, event, now)
        case events.WorkersSucceeded():
            text = f"the workers of {config.node} have ended well; it waits for the others"
            finished = actions.Tell(messages.Finished(config.agent, state.round.round))
            return states.Reported(state.round, True, state.signalled), (actions.Log(text), finished)
        case events.WorkersFailed():
            return states.Reported(state.round, False, state.signalled), (actions.ReportFailure(),)
    return state, ()


def _ends_wait(state: states.Training, event: events.Event, now: float) -> bool:
    """Return True if an agent announces its leave now, without Slurm's answer."""
    match event:
        case events.WorkersSucceeded() | events.WorkersFailed() | messages.Interrupted() | leader_events.LeaderLost():
            return True
        case events.DeadlineReached():
            return now >= state.since + states.ANSWER_TIMEOUT
    return False


def _training_until_leave(
    config: states.LifecycleConfig,
    state: states.Training,
    departure: states.Departure,
    event: events.Event,
    now: float,
) -> Step:
    match event:
        case messages.Interrupted():
            # Slurm tells all agents of a job at the same moment, so each also learns that the others leave.
            return _stop_to_leave(config, state, departure, now, before=_fence(event))
        case leader_events.LeaderLost() if state.stop_step is None:
            return _stop_to_leave(config, state, departure, now)
        case events.WorkersSucceeded() | events.WorkersFailed():
            # Slurm may have signalled the workers, too: their end is neither a failure nor a success.
            return _stop_to_leave(config, state, departure, now)
        case events.DeadlineReached() if now >= departure.stop_by:
            return _stop_to_leave(config, state, departure, now)
    return state, ()


def _reported(config: states.LifecycleConfig, state: states.Reported, event: events.Event, now: float) -> Step:
    match event:
        case messages.Interrupted():
            return _interrupted(config, state, event, now)
        case messages.Holding(round_) if state.succeeded is None:
            return state, (_refuse(config, round_),)
    return state, ()


def _stopping(config: states.LifecycleConfig, state: states.Stopping, event: events.Event, now: float) -> Step:
    match event:
        case messages.Interrupted() if isinstance(state.then, states.Rejoin):
            return _interrupted(config, state, event, now)
        case messages.Interrupted():
            return state, _fence(event)
        case messages.Holding(round_):
            return state, (_refuse(config, round_),)
        case events.WorkersEnded():
            return replace(state, terminate_at=None), (actions.CloseRound(),)
        case events.DeadlineReached() if now >= state.stop_by:
            return replace(state, terminate_at=None), (actions.CloseRound(),)
        case events.DeadlineReached() if state.terminate_at is not None and now >= state.terminate_at:
            return replace(state, terminate_at=None), (actions.TerminateWorkers(),)
        case events.RoundClosed():
            return _closed(config, state, event)
    return state, ()


def _closed(config: states.LifecycleConfig, state: states.Stopping, closed: events.RoundClosed) -> Step:
    if closed.survivors:
        # Workers of another round here would train beside them, and the leader must not take this node for healthy.
        return _give_up(ExitCode.FAILED, closed.survivors), (_tell_left(config, LeaveReason.FAILED),)
    match state.then:
        case states.Rejoin():
            # Workers on other nodes may still be saving; then the store is served until the next round.
            keeps_store = state.agreed or state.signalled
            return states.Joining(agreed=state.agreed), (actions.Join(ends_store=not keeps_store),)
        case states.Departure() as departure:
            left = _tell_left(config, departure.reason, stopped=state.agreed)
            others_stop = state.agreed and state.round.nodes > 1
            serves_store = state.round.place.rank == 0
            if others_stop and (serves_store or closed.leads):
                return states.Lingering(departure), (left,)
            return _left(departure), (left,)
        case states.Done() as done:
            return done, ()


def _lingering(state: states.Lingering, event: events.Event, now: float) -> Step:
    match event:
        case messages.Interrupted() | leader_events.LeaderLost():
            return _left(state.departure), ()
        case events.DeadlineReached() if now >= state.departure.stop_by:
            return _left(state.departure), ()
    return state, ()


def _signal_workers(
    config: states.LifecycleConfig, training: states.Training
) -> tuple[states.Training, tuple[actions.Action, ...]]:
    if not config.signals_workers or training.signalled:
        return training, ()
    return replace(training, signalled=True), (actions.SignalWorkers(),)


def _fence(interrupted: messages.Interrupted) -> tuple[actions.Action, ...]:
    return (actions.Fence(),) if isinstance(interrupted, leader_events.CutOff) else ()


def _interrupted(
    config: states.LifecycleConfig,
    state: states.Training | states.Reported | states.Stopping,
    event: messages.Interrupted,
    now: float,
) -> Step:
    unplanned = event.reason in _UNPLANNED
    timeout = UNPLANNED_STOP_TIMEOUT if unplanned else config.shutdown_timeout
    before = _fence(event)
    return _stop(
        state, states.Rejoin(), now, timeout, signalled_first=not unplanned, before=before, unplanned=unplanned
    )


def _stop_to_leave(
    config: states.LifecycleConfig,
    state: states.Training | states.Reported | states.Stopping,
    departure: states.Departure,
    now: float,
    *,
    before: tuple[actions.Action, ...] = (),
) -> Step:
    """Stop the workers of an agent that has announced its leave, without waiting for the agreed step."""
    if isinstance(state, states.Training):
        # The workers of the other agents cannot agree with these.
        before = (*before, _refuse(config, state.round.round))
    signalled_first = state.signalled and now < departure.stop_by
    by = departure.stop_by if signalled_first else min(now + config.shutdown_timeout, departure.gone_by)
    return _stop(state, departure, now, by - now, signalled_first=signalled_first, before=before)


def _stop(
    state: states.Training | states.Reported | states.Stopping,
    then: states.Then,
    now: float,
    timeout: float,
    *,
    signalled_first: bool = False,
    before: tuple[actions.Action, ...] = (),
    unplanned: bool = False,
) -> Step:
    """Stop the workers within `timeout` seconds.

    Args:
        signalled_first: True if workers that were sent ``--worker-signal`` get `timeout` before SIGTERM.
    """
    by = now + timeout
    if isinstance(state, states.Stopping):
        return replace(state, then=then, stop_by=min(state.stop_by, by)), before
    if signalled_first and state.signalled:
        stopping = states.Stopping(state.round, then, by + UNPLANNED_STOP_TIMEOUT, by, state.signalled)
        return stopping, (*before, actions.ExpectExits(unplanned))
    interrupts = isinstance(then, states.Departure) and then.interrupts
    # As under torchrun a script can catch KeyboardInterrupt.
    stopping = states.Stopping(state.round, then, by, now + timeout / 2 if interrupts else None, state.signalled)
    return stopping, (*before, actions.ExpectExits(unplanned), actions.TerminateWorkers(interrupts))
