"""The life cycle of an agent: events in, actions out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from slurm_elastic.agent.lifecycle import (
    Action,
    AgentOutcome,
    AnnounceLeave,
    AnswerHold,
    CloseRound,
    DeadlineReached,
    Departure,
    DescribeFailure,
    Diagnosed,
    Done,
    End,
    Ending,
    Event,
    ExpectExits,
    FailureDescribed,
    Fence,
    Held,
    Hold,
    Join,
    Joining,
    Leaving,
    LifecycleConfig,
    Lingering,
    Log,
    NoteLeaveRequest,
    Rejoin,
    Reported,
    ReportFailure,
    ReportFinished,
    ReportLeft,
    RequestLeave,
    RoundClosed,
    Signalled,
    SignalWorkers,
    Started,
    StartFailed,
    Starting,
    StartInterrupted,
    StartWorkers,
    State,
    StepAccepted,
    StepRefused,
    StopAtStep,
    Stopping,
    StopServingStore,
    TerminateWorkers,
    Training,
    WorkersEnded,
    WorkersFailed,
    WorkersResult,
    WorkersStarted,
    WorkersSucceeded,
    WorkerWatch,
    deadline,
    depart,
    step,
    worker_watch,
)
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.leader_events import CutOff, LeaderLost, RecordsLost, Unreachable
from slurm_elastic.rendezvous.leave_requests import LeaveRequested
from slurm_elastic.rendezvous.membership import LeaveReason, Outcome, Place, Reason, WorkerFailure
from slurm_elastic.rendezvous.transport import messages

CONFIG = LifecycleConfig("n1", "7", "n0", shutdown_timeout=30.0, leave_margin=5.0)
SIGNALS = LifecycleConfig("n1", "7", "n0", shutdown_timeout=30.0, leave_margin=5.0, signals_workers=True)
NOW = 100.0
FAILURE = WorkerFailure("n1/7.0/1", "n1", 1, 3, "boom")
PREEMPTED = LeaveReason.PREEMPTED
SIGTERM = Signalled(PREEMPTED, "SIGTERM")
LEFT = End(AgentOutcome(ExitCode.LEFT, detail="left after SIGTERM"))
ANNOUNCED = AnnounceLeave(PREEMPTED, 30.0, "SIGTERM")
DEPARTURE = Departure(PREEMPTED, "SIGTERM", stop_by=125.0, gone_by=130.0)
STOP = (ExpectExits(), TerminateWorkers())
STOP_UNPLANNED = (ExpectExits(unplanned=True), TerminateWorkers())


def assignment(rank: int = 1, nodes: int = 2) -> messages.Assignment:
    place = Place("n1/7.0/1", "n1", rank, 1, rank, "default", rank, nodes)
    return messages.Assignment(1, place, 4, Reason.START, nodes, nodes, "n0", 1, 0)


ROUND = assignment()
TRAINING = Training(ROUND)
STATES: tuple[State, ...] = (
    Joining(),
    TRAINING,
    Leaving(TRAINING, DEPARTURE),
    Reported(ROUND, WorkersResult.SUCCEEDED),
    Reported(ROUND, None),
    Stopping(ROUND, Rejoin(), NOW + 1),
    Stopping(ROUND, DEPARTURE, NOW + 1),
    Lingering(ROUND, DEPARTURE),
)


def interrupted(reason: Reason = Reason.NODE_LOST) -> messages.Interrupted:
    return messages.Interrupted(4, reason, "n0", "why")


def cut_off() -> CutOff:
    return CutOff(4, Reason.NODE_LOST, "n1", "silent")


def ended(outcome: Outcome, failure: WorkerFailure | None = None, detail: str = "") -> messages.Ended:
    return messages.Ended(outcome, failure, detail)


def play(
    state: State, *events: Event, config: LifecycleConfig = CONFIG, now: float = NOW
) -> tuple[State, list[Action]]:
    """What becomes of a state, and every action but log lines."""
    actions: list[Action] = []
    for event in events:
        state, more = step(config, state, event, now)
        actions += more
    return state, [action for action in actions if not isinstance(action, Log)]


def logged(state: State, *events: Event) -> list[str]:
    lines = []
    for event in events:
        state, actions = step(CONFIG, state, event, NOW)
        lines += [action.text for action in actions if isinstance(action, Log)]
    return lines


# Joining and starting.


def test_an_agent_joins_first() -> None:
    assert play(Joining(), Started()) == (Joining(), [Join()])


def test_an_agent_that_was_signalled_before_it_began_leaves_without_joining() -> None:
    state, actions = play(Joining(), Started(signalled=True), SIGTERM)
    assert actions == [ANNOUNCED, ReportLeft(PREEMPTED), LEFT]
    assert state == Done(LEFT.outcome, None)


def test_a_place_starts_the_workers() -> None:
    assert play(Joining(), ROUND) == (Starting(ROUND), [StartWorkers(ROUND)])
    assert play(Starting(ROUND), WorkersStarted()) == (TRAINING, [])


def test_a_program_that_cannot_be_run_is_a_worker_that_fails() -> None:
    state, actions = play(Starting(ROUND), StartFailed(FAILURE))
    assert (state, actions) == (Reported(ROUND, WorkersResult.FAILED), [ReportFailure(FAILURE)])


def test_a_start_that_was_given_up_waits_for_the_leader_and_takes_part_in_no_stop() -> None:
    state, actions = play(Starting(ROUND), StartInterrupted(), messages.Holding(4))
    assert (state, actions) == (Reported(ROUND, None), [AnswerHold(4, None)])


def test_an_agent_that_has_joined_does_not_join_again_when_it_hears_once_more_that_the_last_round_is_over() -> None:
    # By its connection, which was broken for a moment, and then by the leader, which had given it up.
    assert play(Joining(), cut_off(), interrupted()) == (Joining(), [])


def test_an_agent_above_the_maximum_is_a_spare() -> None:
    assert play(Joining(), messages.Waiting()) == (Joining(spare=True), [])
    assert logged(Joining(), messages.Waiting()) == ["n1 waits as a spare"]
    assert play(Joining(spare=True), ROUND)[0] == Starting(ROUND)


def test_an_interrupted_agent_interrupts_its_workers_before_it_terminates_them() -> None:
    ctrl_c = Signalled(LeaveReason.CANCELLED, "SIGINT", interrupts=True)
    known = Diagnosed(LeaveReason.CANCELLED, 40.0, "the job was cancelled")
    state, actions = play(TRAINING, ctrl_c, known, interrupted(Reason.NODE_LEFT))
    assert actions[-2:] == [ExpectExits(), TerminateWorkers(interrupt=True)]
    assert deadline(state) == NOW + 15.0
    state, actions = play(state, DeadlineReached(), now=NOW + 15.0)
    assert actions == [TerminateWorkers()]
    assert deadline(state) == NOW + 30.0


# How workers end by themselves.


def test_workers_that_succeed_are_reported() -> None:
    state, actions = play(TRAINING, WorkersSucceeded())
    assert (state, actions) == (Reported(ROUND, WorkersResult.SUCCEEDED), [ReportFinished()])


def test_a_failure_is_described_and_then_reported() -> None:
    state, actions = play(TRAINING, WorkersFailed(), FailureDescribed(FAILURE))
    assert (state, actions) == (Reported(ROUND, WorkersResult.FAILED), [DescribeFailure(), ReportFailure(FAILURE)])


# Interruptions.


@pytest.mark.parametrize(
    ("reason", "seconds"),
    [
        (Reason.NODE_LOST, 0.5),
        (Reason.WORKER_FAILED, 0.5),
        (Reason.NODE_JOINED, 30.0),
        (Reason.NODE_LEFT, 30.0),
        (Reason.REQUEUED, 30.0),
    ],
)
@pytest.mark.parametrize("state", [TRAINING, Reported(ROUND, WorkersResult.FAILED)])
def test_an_interruption_stops_the_workers_and_joins_again(
    state: Training | Reported, reason: Reason, seconds: float
) -> None:
    stopping, actions = play(state, interrupted(reason))
    stop = STOP_UNPLANNED if reason in (Reason.NODE_LOST, Reason.WORKER_FAILED) else STOP
    assert (stopping, tuple(actions)) == (Stopping(ROUND, Rejoin(), NOW + seconds), stop)
    joining, actions = play(stopping, WorkersEnded(), RoundClosed())
    assert (joining, actions) == (Joining(), [CloseRound(), StopServingStore(), Join()])


def test_a_second_interruption_makes_a_stop_shorter_and_never_longer() -> None:
    planned, _ = play(TRAINING, interrupted(Reason.NODE_JOINED))
    shorter, actions = play(planned, interrupted(Reason.NODE_LOST))
    assert (shorter, actions) == (Stopping(ROUND, Rejoin(), NOW + 0.5), [])
    assert play(shorter, interrupted(Reason.NODE_JOINED)) == (shorter, [])


def test_an_agent_that_is_cut_off_fences_its_workers() -> None:
    for state in (TRAINING, Reported(ROUND, None), Stopping(ROUND, Rejoin(), NOW + 9), Leaving(TRAINING, DEPARTURE)):
        assert Fence() in play(state, cut_off())[1]
        assert Fence() not in play(state, interrupted())[1]


def test_workers_that_outlast_the_deadline_are_killed() -> None:
    state = Stopping(ROUND, Rejoin(), NOW + 1)
    assert deadline(state) == NOW + 1
    assert play(state, DeadlineReached()) == (state, [])
    assert play(state, DeadlineReached(), RoundClosed(), now=NOW + 1)[1] == [CloseRound(), StopServingStore(), Join()]


def test_processes_that_survive_sigkill_end_the_agent() -> None:
    outcome = AgentOutcome(ExitCode.FAILED, detail="process 5", gave_up=True)
    for then in (Rejoin(), DEPARTURE, Ending(AgentOutcome(ExitCode.FINISHED))):
        state, actions = play(Stopping(ROUND, then, NOW + 1), WorkersEnded(), RoundClosed(survivors="process 5"))
        assert state == Done(outcome, ROUND)
        assert actions == [CloseRound(), ReportLeft(LeaveReason.FAILED), End(outcome)]


# The planned end of a round.


def test_workers_are_held_and_told_where_to_stop() -> None:
    word = messages.Stopping(4, 12, Reason.NODE_JOINED, "n2", "", 9.0)
    state, actions = play(TRAINING, messages.Holding(4), Held(4, 11), word, StepAccepted(12))
    assert actions == [Hold(4), AnswerHold(4, 11), StopAtStep(4, 12, "node_joined", 9.0)]
    assert state == Training(ROUND, stop_step=12)


def test_the_script_is_told_why_a_node_leaves() -> None:
    word = messages.Stopping(4, 12, Reason.NODE_LEFT, "n2", "preempted", None)
    assert play(TRAINING, word)[1] == [StopAtStep(4, 12, "preempted", None)]


def test_a_step_that_is_refused_is_answered() -> None:
    assert play(TRAINING, StepRefused(4)) == (TRAINING, [AnswerHold(4, None)])


@pytest.mark.parametrize("state", [*STATES[3:5], *STATES[5:]])
def test_who_has_no_running_workers_holds_none(state: State) -> None:
    answers = {Reported(ROUND, WorkersResult.SUCCEEDED): [], Lingering(ROUND, DEPARTURE): []}
    assert play(state, messages.Holding(4)) == (state, answers.get(state, [AnswerHold(4, None)]))  # type: ignore[call-overload]


def test_workers_that_stopped_at_the_step_join_the_next_round_and_the_store_is_served_on() -> None:
    state, actions = play(Training(ROUND, 12), WorkersSucceeded(agreed=True), RoundClosed())
    assert (state, actions) == (Joining(agreed=True), [ExpectExits(), CloseRound(), Join()])


def test_workers_that_get_a_signal_have_time_for_it_before_sigterm() -> None:
    state, actions = play(TRAINING, messages.Holding(4), messages.Holding(4), config=SIGNALS)
    assert actions == [SignalWorkers(), Hold(4), Hold(4)]
    stopping, actions = play(state, interrupted(Reason.NODE_JOINED), config=SIGNALS)
    assert actions == [ExpectExits()]
    assert deadline(stopping) == NOW + 30
    killed_at = NOW + 30.5
    terminated, actions = play(stopping, DeadlineReached(), now=NOW + 30)
    assert (deadline(terminated), actions) == (killed_at, [TerminateWorkers()])
    assert play(terminated, DeadlineReached(), now=killed_at)[1] == [CloseRound()]


def test_workers_that_get_a_signal_have_no_time_when_their_group_is_broken() -> None:
    assert tuple(play(Training(ROUND, signalled=True), interrupted(Reason.NODE_LOST))[1]) == STOP_UNPLANNED


def test_workers_that_end_because_of_their_signal_have_not_succeeded() -> None:
    state, actions = play(Training(ROUND, signalled=True), WorkersSucceeded(), RoundClosed())
    assert (state, actions) == (Joining(), [ExpectExits(), CloseRound(), Join()])


# Leaving.


def test_a_signal_announces_the_leave_and_lets_the_workers_run() -> None:
    state, actions = play(TRAINING, SIGTERM)
    assert (state, actions) == (Leaving(TRAINING, DEPARTURE), [ANNOUNCED])
    assert deadline(state) == 125.0
    assert logged(TRAINING, SIGTERM) == ["n1 got SIGTERM: leaving round 4"]


def test_further_signals_change_nothing() -> None:
    for state in (Leaving(TRAINING, DEPARTURE), Stopping(ROUND, DEPARTURE, NOW), Lingering(ROUND, DEPARTURE)):
        assert play(state, SIGTERM, SIGTERM) == (state, [])


def test_a_leave_signals_the_workers_once() -> None:
    state, actions = play(TRAINING, SIGTERM, messages.Holding(4), config=SIGNALS)
    assert actions == [ANNOUNCED, SignalWorkers(), Hold(4)]
    assert state == Leaving(Training(ROUND, signalled=True), DEPARTURE)


def test_what_slurm_says_moves_the_deadline_and_is_passed_on_to_the_job() -> None:
    news = Diagnosed(LeaveReason.TIME_LIMIT, 60.0, "time limit", for_job=True)
    state, actions = play(Leaving(TRAINING, DEPARTURE), news)
    departure = Departure(LeaveReason.TIME_LIMIT, "time limit", 155.0, 158.75)
    assert state == Leaving(TRAINING, departure)
    assert actions == [
        AnnounceLeave(LeaveReason.TIME_LIMIT, 60.0, "time limit"),
        RequestLeave(LeaveReason.TIME_LIMIT, 60.0, "time limit"),
    ]
    stopping, _ = play(Stopping(ROUND, DEPARTURE, 130.0), Diagnosed(PREEMPTED, 4.0, "preempted"))
    assert isinstance(stopping, Stopping)
    assert stopping.stop_by == 103.5
    # Workers that are being stopped get no more time than they were given.
    later, _ = play(stopping, Diagnosed(PREEMPTED, 60.0, "preempted"))
    assert isinstance(later, Stopping)
    assert later.stop_by == 103.5


def test_a_time_limit_needs_no_signal() -> None:
    news = Diagnosed(LeaveReason.TIME_LIMIT, 20.0, "time limit", for_job=True)
    told = [AnnounceLeave(LeaveReason.TIME_LIMIT, 20.0, "time limit"), RequestLeave(news.reason, 20.0, "time limit")]
    departure = Departure(LeaveReason.TIME_LIMIT, "time limit", 115.0, 118.75)
    assert play(TRAINING, news) == (Leaving(TRAINING, departure), told)
    for state in (Reported(ROUND, None), Stopping(ROUND, Rejoin(), NOW)):
        assert play(state, news)[1][:2] == told
    # Its job's other agents are told before it ends.
    assert play(Joining(), news)[1][:3] == [*told, ReportLeft(LeaveReason.TIME_LIMIT)]


UNKNOWN = Signalled(LeaveReason.NODE_LEFT, "SIGTERM", 15.0, asked=True)
PRESUMED = AnnounceLeave(LeaveReason.NODE_LEFT, 15.0, "SIGTERM")
UNTOLD = Leaving(TRAINING, Departure(LeaveReason.NODE_LEFT, "SIGTERM", 110.0, 113.75), PRESUMED, NOW)


def test_workers_train_on_until_slurm_has_named_the_cause() -> None:
    assert play(TRAINING, UNKNOWN, config=SIGNALS) == (UNTOLD, [])
    assert deadline(UNTOLD) == NOW + 1.0
    cancelled = Departure(LeaveReason.CANCELLED, "scancel", 124.0, 127.75)
    state, actions = play(UNTOLD, Diagnosed(LeaveReason.CANCELLED, 28.0, "scancel"), now=NOW + 1.0, config=SIGNALS)
    assert state == Leaving(Training(ROUND, signalled=True), cancelled)
    assert actions == [AnnounceLeave(LeaveReason.CANCELLED, 28.0, "scancel"), SignalWorkers()]


def test_a_cause_that_slurm_does_not_name_in_time_is_a_node_that_leaves() -> None:
    told = AnnounceLeave(LeaveReason.NODE_LEFT, 14.0, "SIGTERM")
    assert play(UNTOLD, DeadlineReached(), now=NOW + 0.9) == (UNTOLD, [])
    state, actions = play(UNTOLD, DeadlineReached(), now=NOW + 1.0)
    assert (state, actions) == (Leaving(TRAINING, UNTOLD.departure), [told])
    # Slurm may have signalled the workers, too, and other agents have announced that they leave.
    for event in (WorkersFailed(), WorkersSucceeded(), interrupted(), LeaderLost("gone")):
        state, actions = play(UNTOLD, event, now=NOW + 0.5)
        assert isinstance(state, Stopping)
        assert state.then == UNTOLD.departure
        assert actions == [replace(told, seconds=14.5), AnswerHold(4, None), *STOP]
    # An agent without workers waits for nothing.
    assert play(Joining(), UNKNOWN)[1][0] == PRESUMED


def test_a_leaving_agent_whose_workers_do_not_agree_stops_them_alone() -> None:
    for event in (interrupted(), WorkersFailed(), WorkersSucceeded(), LeaderLost("gone")):
        state, actions = play(Leaving(TRAINING, DEPARTURE), event)
        assert (state, actions) == (Stopping(ROUND, DEPARTURE, 130.0), [AnswerHold(4, None), *STOP])
    state, actions = play(Leaving(TRAINING, DEPARTURE), DeadlineReached(), now=125.0)
    assert (state, actions) == (Stopping(ROUND, DEPARTURE, 130.0), [AnswerHold(4, None), *STOP])
    assert play(Leaving(TRAINING, DEPARTURE), DeadlineReached(), now=124.0)[1] == []


def test_workers_that_know_their_step_need_no_leader_any_more() -> None:
    state = Leaving(Training(ROUND, stop_step=12), DEPARTURE)
    assert play(state, LeaderLost("gone")) == (state, [])


def test_signalled_workers_of_a_leaving_agent_have_the_time_until_its_deadline() -> None:
    state, actions = play(Leaving(Training(ROUND, signalled=True), DEPARTURE), interrupted())
    assert state == Stopping(ROUND, DEPARTURE, 125.5, terminate_at=125.0, signalled=True)
    assert actions == [AnswerHold(4, None), ExpectExits()]


def test_signalled_workers_whose_deadline_is_there_are_terminated() -> None:
    state, actions = play(Leaving(Training(ROUND, signalled=True), DEPARTURE), DeadlineReached(), now=125.0)
    assert state == Stopping(ROUND, DEPARTURE, 130.0, signalled=True)
    assert actions == [AnswerHold(4, None), *STOP]


def test_workers_get_no_more_than_their_usual_time_when_the_deadline_is_far() -> None:
    departure = Departure(PREEMPTED, "SIGTERM", stop_by=395.0, gone_by=399.0)
    assert play(Leaving(TRAINING, departure), interrupted())[0] == Stopping(ROUND, departure, 130.0)


@pytest.mark.parametrize("state", [Reported(ROUND, WorkersResult.FAILED), Stopping(ROUND, Rejoin(), NOW + 50)])
def test_an_agent_without_training_workers_leaves_at_once(state: State) -> None:
    stopping, actions = play(state, SIGTERM)
    assert isinstance(stopping, Stopping)
    assert (stopping.then, stopping.stop_by) == (DEPARTURE, 130.0)
    assert actions[0] == ANNOUNCED
    done, actions = play(stopping, WorkersEnded(), RoundClosed())
    assert (done, actions) == (Done(LEFT.outcome, ROUND), [CloseRound(), ReportLeft(PREEMPTED), LEFT])


def test_an_agent_that_joins_leaves_at_once_and_says_how_its_workers_stopped() -> None:
    assert play(Joining(agreed=True), SIGTERM)[1] == [ANNOUNCED, ReportLeft(PREEMPTED, stopped=True), LEFT]


@pytest.mark.parametrize(
    ("rank", "nodes", "leads", "lingers"),
    [(0, 2, False, True), (1, 2, True, True), (1, 2, False, False), (0, 1, True, False)],
)
def test_who_serves_the_store_or_leads_stays_until_the_others_have_stopped(
    rank: int, nodes: int, *, leads: bool, lingers: bool
) -> None:
    round_ = assignment(rank, nodes)
    leaving = Leaving(Training(round_, 12), DEPARTURE)
    state, actions = play(leaving, WorkersSucceeded(agreed=True), RoundClosed(leads=leads))
    left = ReportLeft(PREEMPTED, stopped=True)
    if not lingers:
        assert (state, actions) == (Done(LEFT.outcome, round_), [ExpectExits(), CloseRound(), left, LEFT])
        return
    assert (state, actions) == (Lingering(round_, DEPARTURE), [ExpectExits(), CloseRound(), left])
    assert deadline(state) == 125.0
    for event, now in ((interrupted(), NOW), (LeaderLost("gone"), NOW), (DeadlineReached(), 125.0)):
        assert play(state, event, now=now) == (Done(LEFT.outcome, round_), [LEFT])


def test_a_request_to_leave_is_a_notice_without_a_signal() -> None:
    request = LeaveRequested(LeaveReason.DRAINED, None, "drain")
    state, actions = play(TRAINING, request)
    assert actions == [NoteLeaveRequest(request), AnnounceLeave(LeaveReason.DRAINED, 30.0, "drain")]
    assert isinstance(state, Leaving)
    # One without a deadline says nothing new to an agent that leaves.
    assert play(state, request) == (state, [NoteLeaveRequest(request)])
    request = LeaveRequested(PREEMPTED, 4.0, "preempted")
    assert play(state, request)[1] == [NoteLeaveRequest(request), AnnounceLeave(PREEMPTED, 4.0, "preempted")]


# Ends.

GIVES_UP: tuple[tuple[Event, ExitCode, str, bool], ...] = (
    (Unreachable("no answer"), ExitCode.LEFT, "no leader of run 7 on n0: no answer", True),
    (Unreachable("no answer", usage=True), ExitCode.USAGE, "no leader of run 7 on n0: no answer", False),
    (RecordsLost("disk full"), ExitCode.LEFT, "disk full", False),
)


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
@pytest.mark.parametrize(("event", "code", "detail", "no_leader"), GIVES_UP)
def test_an_agent_gives_up_without_leader_or_records(
    state: State, event: Event, code: ExitCode, detail: str, no_leader: bool
) -> None:
    _gives_up(state, event, AgentOutcome(code, detail=detail, gave_up=True, no_leader=no_leader))


@pytest.mark.parametrize("state", [Joining(), TRAINING, Reported(ROUND, None), Stopping(ROUND, Rejoin(), NOW + 9)])
def test_an_agent_that_does_not_leave_gives_up_when_the_leader_is_lost(state: State) -> None:
    outcome = AgentOutcome(ExitCode.LEFT, detail="the leader on n0 is lost: gone", gave_up=True)
    _gives_up(state, LeaderLost("gone"), outcome)


def _gives_up(state: State, event: Event, outcome: AgentOutcome) -> None:
    state, actions = play(state, event)
    if isinstance(state, Stopping):
        assert actions[0] == Fence()
        assert state.stop_by <= NOW + 1
        state, actions = play(state, SIGTERM, interrupted(), WorkersEnded(), RoundClosed())
        assert actions == [CloseRound(), End(outcome)]
    else:
        assert actions == [End(outcome)]
    assert isinstance(state, Done)
    assert state.outcome == outcome


@pytest.mark.parametrize(
    ("outcome", "code", "without_round"),
    [
        (Outcome.SUCCEEDED, ExitCode.FINISHED, ExitCode.FINISHED),
        (Outcome.CLOSED, ExitCode.FINISHED, ExitCode.FINISHED),
        (Outcome.FAILED, ExitCode.FAILED, ExitCode.FAILED),
        # A run that has trained goes on later; one that never had enough nodes has failed.
        (Outcome.TIMED_OUT, ExitCode.LEFT, ExitCode.FAILED),
    ],
)
def test_the_end_of_the_run_is_the_end_of_the_agent(outcome: Outcome, code: ExitCode, without_round: ExitCode) -> None:
    for state in STATES:
        after, actions = play(state, ended(outcome, FAILURE, "detail"))
        if isinstance(after, Stopping):
            assert after.stop_by == NOW + 0.5
            after, actions = play(after, SIGTERM, RecordsLost("late"), WorkersEnded(), RoundClosed())
        assert isinstance(after, Done)
        assert after.outcome == AgentOutcome(without_round if isinstance(state, Joining) else code, FAILURE, "detail")
        assert isinstance(actions[-1], End)


@pytest.mark.parametrize(
    ("state", "outcome", "result"),
    [
        (Reported(ROUND, WorkersResult.SUCCEEDED), Outcome.SUCCEEDED, WorkersResult.SUCCEEDED),
        (TRAINING, Outcome.SUCCEEDED, None),
        (TRAINING, Outcome.FAILED, WorkersResult.FAILED),
        (Reported(ROUND, WorkersResult.SUCCEEDED), Outcome.FAILED, WorkersResult.FAILED),
        (Joining(), Outcome.FAILED, None),
    ],
)
def test_what_torch_is_told_about_the_workers(state: State, outcome: Outcome, result: WorkersResult | None) -> None:
    _, actions = play(state, ended(outcome), WorkersEnded(), RoundClosed())
    assert [action.result for action in actions if isinstance(action, End)] == [result]


def test_nothing_happens_after_the_end() -> None:
    done = Done(AgentOutcome(ExitCode.LEFT), None)
    events: Iterable[Event] = (SIGTERM, ROUND, interrupted(), WorkersEnded(), DeadlineReached(), LeaderLost("gone"))
    assert play(done, *events) == (done, [])


# What the shell watches.


def test_what_the_shell_watches() -> None:
    assert {type(state): (worker_watch(state), deadline(state)) for state in STATES} == {
        Joining: (WorkerWatch.NOTHING, None),
        Training: (WorkerWatch.RESULT, None),
        Leaving: (WorkerWatch.RESULT, 125.0),
        Reported: (WorkerWatch.EXITS, None),
        Stopping: (WorkerWatch.END, NOW + 1),
        Lingering: (WorkerWatch.NOTHING, 125.0),
    }


# When an agent that leaves stops its workers.


def plan(seconds: float | None) -> Departure:
    return depart(PREEMPTED, "SIGTERM", seconds, shutdown_timeout=30.0, margin=5.0, now=NOW)


def test_without_a_deadline_workers_have_their_usual_time_in_all() -> None:
    assert plan(None) == DEPARTURE


def test_workers_are_killed_before_the_deadline() -> None:
    assert plan(60.0) == Departure(PREEMPTED, "SIGTERM", stop_by=155.0, gone_by=158.75)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 9.0])
def test_a_short_time_is_shared(seconds: float) -> None:
    departure = plan(seconds)
    assert departure.stop_by == NOW + seconds / 2
    assert departure.stop_by < departure.gone_by < NOW + seconds


def test_a_deadline_that_is_past_leaves_a_moment() -> None:
    assert plan(-3.0) == Departure(PREEMPTED, "SIGTERM", stop_by=100.0, gone_by=102.0)
