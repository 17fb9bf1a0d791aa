"""Leaders that end, resign or are cut off, and who follows them: agents in one process that talk by real sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.events import Ended, Interrupted, Leaving, Left, Outcome
from slurm_elastic.rendezvous.transport.messages import Assignment
from tests.local.agents import HANG, eventually
from tests.local.rendezvous.helpers.parties import Party, Run, form, leader_of, options

StartRun = Callable[..., Run]


def places_after(parties: list[Party]) -> list[Assignment]:
    """All stop and join as agents do when they are told to, until each has a place."""
    places: dict[str, Assignment] = {}

    def all_placed() -> bool:
        for party in parties:
            while (word := party.link.next_event(timeout=0)) is not None:
                if isinstance(word, Assignment):
                    places[party.config.agent] = word
                elif isinstance(word, Interrupted):
                    places.pop(party.config.agent, None)
                    party.join()
                else:
                    pytest.fail(f"{party.config.node} heard {word}")
        return len({place.round for place in places.values()}) == 1 and len(places) == len(parties)

    eventually(all_placed, lambda: str(places))
    return [places[party.config.agent] for party in parties]


def test_leaders_that_end_are_followed_at_once_until_one_agent_is_left(start_run: StartRun) -> None:
    # Their silence would tell nobody in the time of this test.
    run = start_run(options=options(leader_limit=2 * HANG))
    rest = run.all_of(4)
    epochs = [form(rest)[0].epoch]
    while len(rest) > 1:
        leader = leader_of(rest)
        leader.die()
        rest = [party for party in rest if party is not leader]
        places = places_after(rest)
        assert {(place.nodes, place.reason) for place in places} == {(len(rest), Reason.NODE_LOST)}
        assert [place.place.rank for place in places] == [*range(len(rest))]
        epochs.append(places[0].epoch)
    assert sorted(set(epochs)) == epochs


@pytest.mark.usefixtures("_patient_search")
def test_one_that_is_left_of_a_run_that_needs_two_waits_for_another_and_no_longer_than_told(
    start_run: StartRun,
) -> None:
    run = start_run(min_nodes=2, expected_nodes=("node1", "node2", "node3"))
    parties = [run.party(0), run.party(1), run.party(2, options=options(join_timeout=1.5))]
    form(parties)
    for party in parties[:2]:
        party.die()
    ended = parties[2].hear_after(Ended)
    assert (ended.outcome, ended.detail) == (Outcome.TIMED_OUT, "1 of at least 2 nodes came within 1.5 s")


def test_who_goes_with_the_leader_does_not_follow_it(start_run: StartRun) -> None:
    parties = start_run().formed(4)
    going, staying = parties[:2], parties[2:]
    for party in going:
        party.link.send(Leaving(party.config.agent, LeaveReason.PREEMPTED))
    for party in staying:
        assert party.hear(Interrupted).reason is Reason.NODE_LEFT
        party.join()
    for party in going:
        party.link.send(Left(party.config.agent, LeaveReason.PREEMPTED))
    places = places_after(staying)
    assert {(place.round, place.nodes) for place in places} == {(1, 2)}
    # It is there still, and would be the first.
    assert not going[1].decisions
