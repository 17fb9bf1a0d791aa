"""The course of a run, between agents in one process that talk by real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.election.events import LeaderLost, Unreachable
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.events import Drop, Ended, Finish, Outcome, Waiting
from slurm_elastic.rendezvous.records.api import RecordsError
from slurm_elastic.rendezvous.transport.messages import Assignment
from tests.local.agents import HANG, eventually
from tests.local.rendezvous.helpers.parties import Run, endpoint, form, interrupted, options, placed
from tests.local.waiting import descriptors

StartRun = Callable[..., Run]


def test_a_first_round_has_all_nodes_in_slurm_order(start_run: StartRun) -> None:
    parties = start_run().all_of(3)
    # The last one first: neither the order of joins nor that of connections counts.
    places = form(parties[::-1])[::-1]
    assert [place.place.rank for place in places] == [0, 1, 2]
    assert [place.place.node for place in places] == ["node1", "node2", "node3"]
    assert {(place.round, place.reason, place.nodes, place.world_size) for place in places} == {(0, Reason.START, 3, 3)}
    assert {(place.store_address, place.store_port) for place in places} == {("127.0.0.1", 30000)}


def test_a_node_leaves_and_another_comes(start_run: StartRun) -> None:
    run = start_run()
    first, second, third = run.all_of(3)
    form([first, second, third])
    second.link.leaving(LeaveReason.PREEMPTED)
    interrupted([first, third], Reason.NODE_LEFT)
    first.join()
    third.join()
    # The one that goes may still have workers: until it has none, no other group trains.
    assert first.link.next_event(timeout=0.2) is None
    second.link.left(LeaveReason.PREEMPTED)
    assert [(place.round, place.reason, place.place.rank) for place in placed([first, third])] == [
        (1, Reason.NODE_LEFT, 0),
        (1, Reason.NODE_LEFT, 1),
    ]

    returned = run.party(1)
    returned.join()
    interrupted([first, third], Reason.NODE_JOINED)
    places = form([first, third])
    places.insert(1, returned.hear(type(places[0])))
    assert [(place.round, place.place.rank, place.restarts) for place in places] == [(2, 0, 0), (2, 1, 0), (2, 2, 0)]


@pytest.mark.parametrize("cohort", [("", 1), ("7.0.1", 2)], ids=["connected", "one srun"])
def test_a_node_that_is_known_to_come_and_joins_late_causes_no_round_of_its_own(
    start_run: StartRun, leaders: list[Leader], cohort: tuple[str, int]
) -> None:
    run = start_run(cohort=cohort, options=options(min_round_time=0.0))
    first = run.party(0, cohort=("", 1))
    form([first])
    early = run.party(1)
    late = run.party(2) if not cohort[0] else None
    eventually(lambda: len(leaders[0].membership.coming) == (2 if late else 1))
    early.join()
    assert first.link.next_event(timeout=0.5) is None
    late = late or run.party(2)
    late.join()
    interrupted([first], Reason.NODE_JOINED)
    assert {place.nodes for place in form([first])} == {3}


def test_a_node_that_dies_before_it_joins_is_not_waited_for(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    first = run.party(0)
    form([first])
    early, late = run.party(1), run.party(2)
    eventually(lambda: len(leaders[0].membership.coming) == 2)
    early.join()
    late.die()
    interrupted([first], Reason.NODE_JOINED)


def test_nodes_that_come_before_a_round_is_over_cause_one_round(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    first = run.party(0)
    form([first])
    others = [run.party(position) for position in range(1, 5)]
    for other in others:
        other.join()
    interrupted([first], Reason.NODE_JOINED)
    # On a busy machine it is over before the last of them has come; how long is waited for others is a unit's test.
    eventually(lambda: len(leaders[0].membership.agents) == 5)
    first.join()
    assert {(place.round, place.nodes) for place in placed([first, *others])} == {(1, 5)}


def test_a_spare_waits_takes_over_and_is_told_the_end(start_run: StartRun) -> None:
    run = start_run(max_nodes=2)
    first, second = run.party(0, min_nodes=2), run.party(1)
    form([first, second])
    spare, last = run.party(2), run.party(3)
    spare.join()
    spare.hear(Waiting)
    last.join()
    last.hear(Waiting)

    second.link.leaving(LeaveReason.PREEMPTED)
    second.link.left(LeaveReason.PREEMPTED)
    interrupted([first], Reason.NODE_LEFT)
    first.join()
    assert [place.place.node for place in placed([first, spare])] == ["node1", "node3"]
    last.hear(Waiting)

    first.link.finished()
    spare.link.finished()
    for party in (first, spare, last):
        assert party.hear(Ended).outcome is Outcome.SUCCEEDED
    assert run.run_dir.is_done()
    # One that comes later is told so, too.
    late = run.party(4)
    late.join()
    assert late.hear(Ended).outcome is Outcome.SUCCEEDED


def test_a_round_has_a_valid_number_of_nodes_and_grows_to_the_next(start_run: StartRun) -> None:
    run = start_run(min_nodes=2, options=options(valid_nodes=(2, 4), min_round_time=0.0))
    members, (spare, last) = [run.party(0), run.party(1)], (run.party(2), run.party(3))
    form(members)
    spare.join()
    spare.hear(Waiting)
    last.join()
    interrupted(members, Reason.NODE_JOINED)
    for party in members:
        party.join()
    assert {(place.round, place.nodes) for place in placed([*members, spare, last])} == {(1, 4)}


def test_who_has_finished_is_not_disturbed_by_another_that_goes_after_it_finished(start_run: StartRun) -> None:
    parties = start_run().all_of(2)
    form(parties)
    first, second = parties
    second.link.finished()
    second.link.left(LeaveReason.FINISHED)
    second.link.stop()
    assert first.link.next_event(timeout=0.2) is None
    first.link.finished()
    assert first.hear(Ended).outcome is Outcome.SUCCEEDED


def test_failures_are_charged_to_the_run_until_it_fails(start_run: StartRun) -> None:
    run = start_run(max_restarts=2)
    parties = run.all_of(3)
    form(parties)
    for restarts, failing in enumerate(parties[:2], 1):
        failing.fail()
        interrupted(parties, Reason.WORKER_FAILED)
        assert {place.restarts for place in form(parties)} == {restarts}
    failure = parties[2].fail(exit_code=7)
    for party in parties:
        assert party.hear(Ended) == Ended(Outcome.FAILED, failure, "")
    assert not run.run_dir.is_done()


def test_failures_on_all_nodes_at_once_are_one_failure(start_run: StartRun) -> None:
    parties = start_run(max_restarts=1).all_of(3)
    form(parties)
    for party in parties:
        party.fail()
    interrupted(parties, Reason.WORKER_FAILED)
    assert {place.restarts for place in form(parties)} == {1}


def test_a_failure_that_a_lost_node_explains_is_not_charged(start_run: StartRun) -> None:
    parties = start_run().all_of(3)
    form(parties)
    first, second, third = parties
    # As a killed process would, it ends without a word.
    third.link.stop()
    second.fail()
    interrupted([first, second], Reason.NODE_LOST)
    assert {(place.restarts, place.nodes) for place in form([first, second])} == {(0, 2)}


def test_a_closed_run_ends_for_everybody(start_run: StartRun) -> None:
    run = start_run()
    parties = run.all_of(2)
    form(parties)
    parties[1].link.close_run()
    for party in parties:
        assert party.hear(Ended).outcome is Outcome.CLOSED
    assert not run.run_dir.is_done()


def test_a_run_closed_before_there_is_a_leader_is_closed_as_soon_as_there_is_one(start_run: StartRun) -> None:
    run = start_run(min_nodes=2)
    early = run.party(1)
    early.link.close_run()
    leader = run.party(0)
    leader.join()
    assert leader.hear(Ended).outcome is Outcome.CLOSED
    early.join()
    assert early.hear(Ended).outcome is Outcome.CLOSED


@pytest.mark.usefixtures("_patient_search")
def test_too_few_nodes_are_given_up(start_run: StartRun) -> None:
    run = start_run(min_nodes=2, options=options(join_timeout=0.3))
    first = run.party(0)
    first.join()
    ended = first.hear(Ended)
    assert ended.outcome is Outcome.TIMED_OUT
    assert ended.detail == "1 of at least 2 nodes came within 0.3 s"


def test_a_leader_that_never_comes_is_given_up(start_run: StartRun) -> None:
    alone = start_run(options=options(join_timeout=0.3)).party(1)
    alone.join()
    word = alone.hear(Unreachable)
    assert not word.usage


def test_a_last_call_waits_for_nodes_that_are_unknown(start_run: StartRun) -> None:
    times = options(last_call_timeout=0.5)
    run = start_run(expected_nodes=("node1", "node2", "node3"), min_nodes=2, options=times)
    first, second = run.party(0), run.party(1)
    began = time.monotonic()
    assert {place.nodes for place in form([first, second])} == {2}
    assert time.monotonic() - began >= 0.5


def test_a_leader_that_does_not_know_who_comes_waits_for_all_of_a_job(start_run: StartRun) -> None:
    run = start_run(cohort=("7.0.0", 3))
    first, second = run.party(0), run.party(1)
    for party in (first, second):
        party.join()
    # What is waited for is what does not come: a round of two.
    assert first.link.next_event(timeout=0.3) is None
    third = run.party(2)
    third.join()
    assert {place.nodes for place in placed([first, second, third])} == {3}


def test_a_second_one_that_may_lead_follows(start_run: StartRun) -> None:
    run = start_run(expected_nodes=("node1", "node2"))
    first = run.party(0)
    second = run.party(1, may_lead=True)
    assert (first.link.leads, second.link.leads) == (True, False)
    assert {place.nodes for place in form([first, second])} == {2}


def test_a_requeued_job_is_a_run_of_its_own_that_counts_rounds_on(start_run: StartRun, tmp_path: Path) -> None:
    before = start_run()
    old = before.party(0)
    assert form([old])[0].round == 0
    after = start_run(tmp_path, restart_count=1)
    new = after.party(0)
    assert new.link.leads
    place = form([new])[0]
    assert (place.round, place.reason, place.nodes) == (1, Reason.REQUEUED, 1)
    # An agent of the incarnation before does not meet the new leader, though it looks there.
    late = before.party(1)
    late.join()
    interrupted([old], Reason.NODE_JOINED)
    assert new.silent()


def test_a_leader_whose_round_was_published_by_another_begins_anew_with_an_epoch_of_its_own(
    start_run: StartRun,
) -> None:
    run = start_run()
    leader = run.party(0)
    assert run.run_dir.claim_round(0, b"{}")
    leader.join()
    place = leader.hear(Assignment)
    assert (place.round, place.epoch) == (1, 2)


def test_a_leader_that_cannot_write_a_round_down_publishes_none(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()
    leader = run.party(0)
    (run.run_dir.path / "rounds").rmdir()
    (run.run_dir.path / "rounds").write_text("in the way")
    leader.join()
    assert "rounds" in leader.hear(LeaderLost).why
    assert not caplog.records


def test_two_runs_of_the_same_id_in_other_directories_do_not_meet(start_run: StartRun, tmp_path: Path) -> None:
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(start_run(tmp_path / name))
    for run in runs:
        parties = run.all_of(2)
        assert {place.nodes for place in form(parties)} == {2}
    # They would, if both had the port that comes first.
    ports = {run.run_dir.endpoint("run.0") for run in runs}
    assert len(ports) == 2


def test_who_does_not_see_the_run_directory_yet_tries_the_ports_in_order(start_run: StartRun, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = start_run(tmp_path / "other").party(0)
    run = start_run()
    leader = run.party(0, expected_nodes=("node1", "node2"))
    for path in (run.run_dir.path / "endpoints").iterdir():
        path.unlink()
    member = run.party(1)
    assert {place.nodes for place in form([leader, member])} == {2}
    assert stranger.silent()


def test_the_end_is_told_once_more_to_who_missed_it(start_run: StartRun) -> None:
    run = start_run()
    parties = run.all_of(2)
    form(parties)
    for party in parties:
        party.link.finished()
        party.link.left(LeaveReason.FINISHED)
    eventually(lambda: any(isinstance(decision, Finish) for decision in parties[0].decisions))
    again = run.party(1)
    again.join()
    assert again.hear(Ended).outcome is Outcome.SUCCEEDED


def test_a_leader_that_stops_first_tells_the_end_however_slow_the_disk(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FencedRecords.finish

    def slowly(self: FencedRecords, decision: Finish) -> bool:
        time.sleep(0.2)
        return finish(self, decision)

    monkeypatch.setattr(FencedRecords, "finish", slowly)
    run = start_run()
    leader, member = run.all_of(2)
    form([leader, member])
    for party in (member, leader):
        party.link.finished()
        party.link.left(LeaveReason.FINISHED)
    member.link.stop()
    leader.link.stop()
    assert run.run_dir.is_done()
    assert any(isinstance(decision, Finish) for decision in leader.decisions)


def break_connections(port: int) -> None:
    """Break this process's connections to a port."""
    for descriptor, name in descriptors().items():
        if name.startswith("socket:"):
            # Another thread may close its socket in between.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_breaks_is_made_again_and_nothing_changes(
    start_run: StartRun, leaders: list[Leader], leader_settings: dict[str, float]
) -> None:
    leader_settings["reconnect_grace"] = 2 * HANG
    run = start_run(run_id=f"run-{os.getpid()}")
    # Without an endpoint in the run directory all ports are tried in order, and nobody listens at the first.
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            # Else somebody listens there already.
            stack.enter_context(socket.create_server(("", run.config.ports[0])))
        leader = run.party(0)
    port = endpoint(run)["port"]
    for path in (run.run_dir.path / "endpoints").iterdir():
        path.unlink()
    member = run.party(1)
    leader.join()
    member.join()
    eventually(lambda: len(leaders[0].connections.by_agent) == 2)
    before = leaders[0].connections.by_agent[member.config.agent]
    break_connections(port)
    eventually(lambda: leaders[0].connections.by_agent.get(member.config.agent) not in (None, before))
    assert not any(isinstance(decision, Drop) for decision in leader.decisions)


def test_records_that_are_lost_after_the_end_are_no_news(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (party,) = start_run().all_of(1)
    party.link.stop()
    # Its number may be another file's by now.
    written: list[int] = []
    monkeypatch.setattr(os, "eventfd_write", lambda descriptor, count: written.append(descriptor))
    party.link.records_lost(RecordsError("lost"))
    assert party.link.fd not in written


def test_stopping_twice_is_harmless(start_run: StartRun) -> None:
    party = start_run().party(0)
    party.link.stop()
    party.link.stop()


@pytest.mark.parametrize("joined", [False, True])
def test_an_agent_that_stops_before_it_has_found_a_leader_stops_at_once(start_run: StartRun, joined: bool) -> None:
    alone = start_run().party(1)
    if joined:
        alone.join()
    alone.link.left(LeaveReason.PREEMPTED)
    alone.link.stop()


def test_nothing_is_left_of_a_leader_that_has_ended(start_run: StartRun, leaders: list[Leader]) -> None:
    run = start_run()
    parties = run.all_of(2)
    form(parties)
    leader = leaders[0]
    # It does not wait until the others have gone.
    next(party for party in parties if party.link.leads).link.stop(timeout=0)
    # The connections that it closes tell of it when its timer and tasks are gone.
    assert leader._timer is None or leader._timer.cancelled()
    assert not leader._tasks
