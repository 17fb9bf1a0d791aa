"""Whom a worker failure is charged to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.membership import (
    Connected,
    Decision,
    Disconnected,
    Drop,
    Finish,
    Finished,
    Held,
    Interrupt,
    Joined,
    LeaveReason,
    Leaving,
    Left,
    Outcome,
    Phase,
    Ponged,
    Probed,
    Publish,
    Reason,
    Send,
    Tick,
    WorkerFailed,
)
from tests.unit.rendezvous.helpers.scenario import Scenario, candidate, failed, only, sent


@pytest.fixture
def run() -> Scenario:
    """Three members, one restart, no failure so far."""
    run = Scenario(min_nodes=3, max_restarts=1, settle_time=0.1, heartbeat_limit=3.0)
    run.join("n0", "n1", "n2")
    return run


def answer(run: Scenario, *names: str) -> None:
    for name in names:
        run.on(Ponged(name, run.state.probe))


@pytest.mark.parametrize("first", ["n0", "n1"])
def test_a_failure_that_is_not_charged_is_the_cause_of_the_others(first: str) -> None:
    """As of an agent that starts its workers in another way from now on."""
    run = Scenario(min_nodes=2, max_restarts=0, settle_time=0.1)
    run.join("n0", "n1")
    own, peer = failed("n0"), failed("n1")
    own = replace(own, failure=replace(own.failure, message="starts again", uncharged=True))
    for event in (own, peer) if first == "n0" else (peer, own):
        run.on(event)
    answer(run, "n0", "n1")
    (interrupt,) = only(Interrupt, run.wait(0.2))
    assert (interrupt.message.node, interrupt.message.detail, run.state.restarts) == ("n0", "rank 3: starts again", 0)


def consequence(name: str) -> WorkerFailed:
    event = failed(name)
    return replace(event, failure=replace(event.failure, message="connection closed by peer", consequence=True))


@pytest.mark.parametrize("first", ["n0", "n1"])
def test_a_consequence_is_not_the_root(run: Scenario, first: str) -> None:
    root, peer = failed("n0"), consequence("n1")
    for event in (root, peer) if first == "n0" else (peer, root):
        run.on(event)
    answer(run, "n0", "n1", "n2")
    assert only(Interrupt, run.wait(0.2))[0].failure == root.failure


def test_the_root_is_waited_for_while_only_consequences_are_known(run: Scenario) -> None:
    run.on(consequence("n1"))
    run.on(consequence("n2"))
    answer(run, "n0", "n1", "n2")
    assert not run.wait(0.9)
    run.on(failed("n0"))
    (interrupt,) = only(Interrupt, run.wait(0.02))
    assert interrupt.message.node == "n0"


def test_a_consequence_without_a_root_is_charged(run: Scenario) -> None:
    run.on(consequence("n1"))
    answer(run, "n0", "n1", "n2")
    (interrupt,) = only(Interrupt, run.wait(1.02))
    assert (interrupt.message.node, run.state.restarts) == ("n1", 1)


def test_everybody_is_asked_before_anybody_is_blamed(run: Scenario) -> None:
    assert sent(Probed, run.on(failed("n0"))) == [Send(("n0", "n1", "n2"), Probed(1))]
    answer(run, "n0", "n1")
    assert not run.wait(2.0), "n2 has not answered"
    answer(run, "n2")
    (interrupt,) = only(Interrupt, run.wait(0.0))
    assert interrupt.message.reason is Reason.WORKER_FAILED
    assert (interrupt.message.node, interrupt.message.detail) == ("n0", "rank 3: exit code 1")
    assert run.state.restarts == 1


def test_a_verdict_waits_for_news_that_are_under_way(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n0", "n1", "n2")
    assert not run.wait(0.09)
    assert only(Interrupt, run.wait(0.02))


def test_all_members_of_the_next_round_are_told_the_same_count(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n0", "n1", "n2")
    run.wait(0.2)
    (published,) = only(Publish, run.join("n0", "n1", "n2", last_round=0))
    assert published.table.restarts == 1


def test_a_silent_node_explains_the_failures_of_its_peers(run: Scenario) -> None:
    run.on(failed("n0"))
    run.on(failed("n1"))
    answer(run, "n0", "n1")
    decisions = run.wait(4.0, "n2")
    assert only(Drop, decisions)[0].agent == "n2"
    assert only(Interrupt, decisions)[0].message.reason is Reason.NODE_LOST
    assert run.state.restarts == 0


def test_a_broken_connection_explains_them_even_after_an_answer(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n0", "n1", "n2")
    run.wait(0.05)
    run.on(Disconnected("n2"))
    assert only(Interrupt, run.wait(0.2))[0].message.reason is Reason.NODE_LOST
    assert run.state.restarts == 0


def test_the_node_that_told_may_itself_be_dying(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n1", "n2")
    assert only(Interrupt, run.wait(4.0, "n0"))[0].message.reason is Reason.NODE_LOST
    assert run.state.restarts == 0


def test_a_leave_explains_them(run: Scenario) -> None:
    run.on(failed("n0"))
    assert only(Interrupt, run.on(Leaving("n2", LeaveReason.PREEMPTED)))[0].message.reason is Reason.NODE_LEFT
    assert run.state.restarts == 0


def test_a_question_that_was_lost_with_the_connection_is_asked_again(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n0", "n1")
    run.on(Disconnected("n2"))
    assert sent(Probed, run.on(Connected("n2", running=0))) == [Send(("n2",), Probed(1))]
    assert not run.wait(1.0)
    answer(run, "n2")
    assert only(Interrupt, run.wait(0.0))[0].message.reason is Reason.WORKER_FAILED


def test_an_agent_that_joins_again_at_once_is_charged_all_the_same(run: Scenario) -> None:
    run.on(failed("n0"))
    assert run.join("n0", last_round=0) == ()
    answer(run, "n0", "n1", "n2")
    assert only(Interrupt, run.wait(0.2))[0].agents == ("n1", "n2")
    assert run.state.restarts == 1


def test_an_agent_that_has_joined_again_and_is_lost_explains_it(run: Scenario) -> None:
    run.on(failed("n0"))
    run.join("n0", last_round=0)
    answer(run, "n1", "n2")
    run.on(Disconnected("n0"))
    assert only(Interrupt, run.wait(0.2))[0].message.reason is Reason.NODE_LOST
    assert run.state.restarts == 0


def test_an_agent_that_restarts_its_workers_untold_is_followed_and_not_charged(run: Scenario) -> None:
    (interrupt,) = only(Interrupt, run.join("n1", last_round=0))
    assert interrupt.agents == ("n0", "n2")
    assert run.state.restarts == 0


def test_an_agent_that_was_cut_off_and_is_back_has_no_worker_that_failed(run: Scenario) -> None:
    (interrupt,) = only(Interrupt, run.on(Joined(candidate("n1"), 2, 0, cut_off=True)))
    assert (interrupt.message.reason, interrupt.message.node) == (Reason.NODE_LOST, "n1")
    assert interrupt.message.detail == "it did not hear the leader, stopped its workers and is back"


@pytest.mark.parametrize("stops", [False, True], ids=["", "while a stop is agreed"])
@pytest.mark.parametrize("joined_first", [False, True], ids=["failed first", "joined first"])
@pytest.mark.parametrize("consequence", [False, True], ids=["root", "consequence"])
def test_what_follows_from_the_stop_of_an_agent_that_was_cut_off_is_not_charged(
    stops: bool, joined_first: bool, consequence: bool
) -> None:
    run = Scenario(answers=stops, min_nodes=3, max_restarts=1, settle_time=0.1, heartbeat_limit=3.0)
    run.join("n0", "n1", "n2")
    if stops:
        run.on(Leaving("n2", LeaveReason.PREEMPTED, 30.0))
        for name in ("n0", "n1", "n2"):
            run.on(Held(name, 0, 5))
        assert run.state.planned_stop is not None
        assert run.state.planned_stop.stop == 5
    own = failed("n0")
    own = replace(own, failure=replace(own.failure, consequence=consequence))
    back = Joined(candidate("n1"), 2, 0, cut_off=True)
    decisions: list[Decision] = []
    for event in (back, own) if joined_first else (own, back):
        decisions += run.on(event)
    answer(run, "n0", "n2", *(("n1",) if joined_first else ()))
    decisions += run.wait(0.2)
    (interrupt,) = only(Interrupt, decisions)
    if consequence or (joined_first and not stops):
        assert (interrupt.message.reason, interrupt.message.node) == (Reason.NODE_LOST, "n1")
        assert run.state.restarts == 0
    else:
        assert interrupt.message.reason is Reason.WORKER_FAILED
        assert run.state.restarts == 1


def test_failures_that_the_end_of_a_round_causes_are_nobodys_fault(run: Scenario) -> None:
    run.on(Leaving("n2", LeaveReason.PREEMPTED))
    assert run.on(failed("n0")) == ()
    run.on(Left("n2", LeaveReason.PREEMPTED))
    run.join("n3")
    run.join("n0", "n1", last_round=0)
    assert run.state.phase is Phase.RUNNING
    assert run.on(failed("n0", round_=0)) == (), "it is about the round before"
    assert run.state.inquest is None


def test_the_run_fails_when_its_restarts_are_used_up(run: Scenario) -> None:
    for round_ in (0, 1):
        run.on(failed("n1", round_))
        answer(run, "n0", "n1", "n2")
        decisions = run.wait(0.2)
        if round_ == 0:
            run.join("n0", "n1", "n2", last_round=0)
    (finish,) = only(Finish, decisions)
    assert finish.message.outcome is Outcome.FAILED
    assert finish.message.failure is not None
    assert finish.message.failure.node == "n1"
    assert set(finish.agents) == {"n0", "n1", "n2"}


def test_a_member_that_finishes_and_goes_owes_no_answer(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n0", "n1")
    run.on(Finished("n2", 0))
    run.on(Left("n2", LeaveReason.FINISHED))
    assert only(Interrupt, run.wait(0.2))[0].message.reason is Reason.WORKER_FAILED


def test_new_nodes_wait_for_the_verdict(run: Scenario) -> None:
    run.on(failed("n0"))
    run.join("n3")
    assert not run.wait(1.0)
    answer(run, "n0", "n1", "n2")
    assert only(Interrupt, run.wait(0.0))[0].message.reason is Reason.WORKER_FAILED
    run.join("n0", "n1", "n2", last_round=0)
    assert run.members == ["n0", "n1", "n2", "n3"]


def test_a_pause_of_the_leader_does_not_shorten_the_time_to_explain(run: Scenario) -> None:
    run.on(failed("n0"))
    answer(run, "n0", "n1", "n2")
    run.pause(10.0)
    assert run.on(Tick()) == ()
    run.on(Disconnected("n2"))
    assert only(Interrupt, run.wait(0.2))[0].message.reason is Reason.NODE_LOST


def fails(run: Scenario, fingerprint: str, *, uncharged: bool = False) -> tuple[Decision, ...]:
    """A worker of n0 fails in the running round, and the leader judges it."""
    event = failed("n0", run.state.round)
    failure = replace(event.failure, fingerprint=fingerprint, where="at step 7", uncharged=uncharged)
    run.on(replace(event, failure=failure))
    answer(run, "n0", "n1", "n2")
    decisions = run.wait(0.2)
    if run.state.phase is Phase.FORMING:
        decisions += run.join("n0", "n1", "n2", last_round=run.state.round - 1)
    return decisions


@pytest.fixture
def patient() -> Scenario:
    """Three members, many restarts, no failure so far."""
    run = Scenario(min_nodes=3, max_restarts=100, settle_time=0.1, heartbeat_limit=3.0)
    run.join("n0", "n1", "n2")
    return run


def test_the_same_failure_twice_in_a_row_ends_the_run(patient: Scenario) -> None:
    (published,) = only(Publish, fails(patient, "the same"))
    assert published.table.last_failure == "the same"
    (finish,) = only(Finish, fails(patient, "the same"))
    assert finish.message.outcome is Outcome.FAILED
    assert finish.message.detail == (
        "the same failure twice in a row, at step 7 (--stop-on-same-failure off restarts all the same)"
    )
    assert finish.message.failure is not None


@pytest.mark.parametrize("fingerprints", [("a", "b", "a"), ("a", "", "a"), ("", "", "")])
def test_another_failure_in_between_is_charged(patient: Scenario, fingerprints: tuple[str, ...]) -> None:
    for number, fingerprint in enumerate(fingerprints, 1):
        assert only(Publish, fails(patient, fingerprint))
        assert patient.state.restarts == number


def test_a_failure_after_a_start_from_something_else_is_another_one() -> None:
    """As with snapshots: an older one may be without what makes the script fail."""
    origins = iter(["", "second", "first", "first"])
    run = Scenario(min_nodes=3, max_restarts=100, choose_origin=lambda *_: next(origins))
    run.join("n0", "n1", "n2")
    for _ in range(3):
        assert only(Publish, fails(run, "a"))
    assert only(Finish, fails(run, "a"))


def test_a_failure_that_is_not_charged_counts_for_nothing(patient: Scenario) -> None:
    fails(patient, "a")
    assert only(Publish, fails(patient, "a", uncharged=True))
    assert only(Finish, fails(patient, "a"))


def test_a_new_leader_knows_the_last_failure() -> None:
    run = Scenario(min_nodes=3, max_restarts=100, first_failure="a")
    (published,) = only(Publish, run.join("n0", "n1", "n2"))
    assert published.table.last_failure == "a"
    assert only(Finish, fails(run, "a"))
