"""The course of a run, between agents in one process that talk by real sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.election.events import LeaderLost
from slurm_elastic.rendezvous.election.runner import Runner
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.events import Drop, Finish, Finished, Left
from slurm_elastic.rendezvous.transport.messages import Assignment
from tests.local.agents import HANG, eventually
from tests.local.rendezvous.helpers.parties import Run, endpoint, form, interrupted, options
from tests.local.waiting import descriptors

StartRun = Callable[..., Run]


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
    assert run.run_dir.claim_record({}, "rounds", 0)
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
    eventually(lambda: caplog.records)
    rounds = run.run_dir.path / "rounds"
    assert caplog.messages == [
        f"this agent cannot campaign to lead: {rounds}: a file has the name of a directory; move the file"
    ]


def test_an_agent_that_cannot_serve_says_so(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Runner, "open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        start_run().party(0)


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


def test_a_leader_that_stops_first_tells_the_end_however_slow_the_disk(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FencedRecords.finish

    def slowly(self: FencedRecords, decision: Finish) -> bool:
        time.sleep(0.2)
        return finish(self, decision)

    monkeypatch.setattr(FencedRecords, "finish", slowly)
    run = start_run()
    leader, member = run.formed(2)
    for party in (member, leader):
        party.link.send(Finished(party.config.agent, 0))
        party.link.send(Left(party.config.agent, LeaveReason.FINISHED))
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
    party.link._records_lost(RecordsError("lost"))
    assert party.link.fd not in written


@pytest.mark.parametrize("joined", [False, True])
def test_an_agent_that_stops_before_it_has_found_a_leader_stops_at_once(start_run: StartRun, joined: bool) -> None:
    alone = start_run().party(1)
    if joined:
        alone.join()
    alone.link.send(Left(alone.config.agent, LeaveReason.PREEMPTED))
    alone.link.stop()


def test_nothing_is_left_of_a_leader_that_has_ended(start_run: StartRun, leaders: list[Leader]) -> None:
    parties = start_run().formed(2)
    leader = leaders[0]
    # It does not wait until the others have gone.
    next(party for party in parties if party.link.leads).link.stop(timeout=0)
    # The connections that it closes tell of it when its timer and tasks are gone.
    assert leader._timer is None or leader._timer.cancelled()
    assert not leader._tasks
