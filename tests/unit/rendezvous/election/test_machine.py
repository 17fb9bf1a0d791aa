"""How an agent searches for a leader: through a cut, of very many members, and in the records."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.election.events import (
    Connect,
    Join,
    LeaderLocationRead,
    LinkClosed,
    ReadCampaignRecords,
    ReadLeaderLocation,
    Received,
)
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.election.state import Lookup, Search
from slurm_elastic.rendezvous.transport.messages import Endpoint, Successor
from tests.unit.rendezvous.helpers import election


@pytest.mark.parametrize("healed_at", [0.01, 0.9, 1.1, 2.9, 3.1, 12.3, 27.0])
def test_an_agent_that_searches_through_a_cut_finds_the_leader_within_a_second_of_its_end(healed_at: float) -> None:
    def connect(endpoint: Endpoint, now: float) -> election.Result:
        return (0.0, 1) if now >= healed_at and endpoint == election.FIRST else (1.0, Answer.SILENT)

    play = election.member(2, connect=connect, leads=False)
    while play.state.link is None:
        play.handle_next()
    assert play.now < healed_at + 1.1


def test_of_thousands_of_members_on_record_only_the_first_are_looked_for() -> None:
    order = tuple(Successor(f"n{rank}/0.0/{rank}", f"n{rank}", rank) for rank in range(1, 2001))
    location = LeaderLocation((election.FIRST,), published=True, successors=order, round=0)
    tried: set[Endpoint] = set()

    def dead(endpoint: Endpoint, now: float) -> election.Result:
        tried.add(endpoint)
        return (0.0, Answer.ENDED) if endpoint[1] <= 100 else (0.01, Answer.IDLE)

    play = election.Play(locate=lambda now: location, connect=dead)
    play.run(0.9)
    # Those that have ended are passed over, and eight that live are asked.
    assert 8 <= len(tried) <= 110
    assert max(port for _, port in tried) <= 108


def leaderless(agent: str, nodes: int) -> election.Play:
    """A member of a round of so many, whose leader ended at 0.5 s; the others live, and none leads."""

    def connect(endpoint: Endpoint, now: float) -> election.Result:
        return (0.0, 1) if now < 0.5 else election.idle(endpoint, now)

    play = election.Play(agent, locate=lambda now: election.PUBLISHED, connect=connect, leads=False).run(0.5)
    assert play.state.link is not None
    number = play.state.link.number
    play.handle(Join(election.CANDIDATE))
    play.handle(Received(number, replace(election.PLACED, nodes=nodes)))
    play.actions.clear()
    play.handle(LinkClosed(number))
    return play.run(10.0)


def questions(play: election.Play) -> list[float]:
    """When the agent read the records, or tried an endpoint other than that of its former leader."""
    return [
        moment
        for moment, action in play.actions
        if isinstance(action, ReadLeaderLocation) or (isinstance(action, Connect) and action.endpoint != election.FIRST)
    ]


def test_members_of_a_large_round_do_not_all_ask_at_once_and_ask_less_often() -> None:
    few, many = (
        [questions(leaderless(f"n{index}/0.0/{index}", nodes)) for index in range(100, 132)] for nodes in (512, 16384)
    )
    assert {asked[0] for asked in few} == {0.5}
    first = sorted(asked[0] for asked in many)
    assert len(set(first)) == len(first)
    assert max(sum(at <= moment < at + 1.0 for moment in first) for at in first) <= len(first) / 2
    assert all(4 * len(later) < len(sooner) for sooner, later in zip(few, many, strict=True))


def test_members_of_a_large_round_ask_one_living_successor_first_and_more_as_time_goes_by() -> None:
    order = tuple(Successor(f"n{rank}/0.0/{rank}", f"n{rank}", rank) for rank in range(2, 40))
    known = replace(election.TOLD, successors=order, members=16384)
    tried: dict[float, set[Endpoint]] = {}

    def alive(endpoint: Endpoint, now: float) -> election.Result:
        tried.setdefault(now, set()).add(endpoint)
        return 0.0, Answer.ENDED if endpoint[1] < 10 else Answer.IDLE

    play = election.Play("n99/0.0/99", locate=lambda now: election.PUBLISHED, connect=alive, known=known, leads=False)
    play.state = replace(play.state, search=Search(0.0, election.FIRST, least_pause=4.0))
    play.run(0.9)
    assert set().union(*tried.values()) == {election.FIRST, *(("n" + str(rank), rank) for rank in range(2, 11))}
    play.run(4.9)
    assert max(port for _, port in set().union(*tried.values())) == 14


def test_an_agent_of_a_large_run_reads_and_tries_less_often_from_its_start() -> None:
    unled = LeaderLocation((election.FIRST,))
    play = election.Play(locate=lambda now: unled, connect=election.refuse, leads=False, min_nodes=16384).run(9.9)
    for kind in (ReadLeaderLocation, Connect):
        times = play.times(kind)
        assert len(times) > 2
        assert all(later - sooner >= 2.9 for sooner, later in itertools.pairwise(times))


def test_the_first_successors_of_a_large_round_search_at_full_rate() -> None:
    agent = election.ORDER[1].agent
    assert questions(leaderless(agent, 16384)) == questions(leaderless(agent, 512))


def test_the_record_of_a_round_is_read_once() -> None:
    play = election.Play(locate=lambda now: election.PUBLISHED, connect=election.cut, leads=False).run(3.0)
    known = [action.known for _, action in play.actions if isinstance(action, ReadLeaderLocation)]
    assert len(known) > 3
    assert known == [LeaderLocation(), *[election.PUBLISHED] * (len(known) - 1)]


def test_the_record_of_a_round_is_not_read_where_a_leader_has_told_of_it() -> None:
    newer = replace(election.PUBLISHED, round=1)
    play = election.member(3, connect=election.cut, leads=False, locate=lambda now: newer).run(1.2)
    known = [action.known for _, action in play.actions if isinstance(action, ReadLeaderLocation)]
    leading = {"address": "n1", "port": 1, "epoch": 1}
    assert known == [LeaderLocation(successors=election.ORDER[1:], round=0, leading=leading), newer, newer]


@pytest.mark.parametrize("began", [0.5 + step * 0.03 for step in range(40)])
def test_a_first_leader_is_not_taken_for_lost_because_nobody_listened_before_it_came(began: float) -> None:
    def connect(endpoint: Endpoint, now: float) -> election.Result:
        return (0.0, 1) if now >= began else (0.0, Answer.ENDED)

    def locate(now: float) -> LeaderLocation:
        return LeaderLocation((election.FIRST,), published=now >= began)

    play = election.Play(locate=locate, connect=connect).run(began + 0.55)
    assert play.state.link is not None
    assert not [action for _, action in play.actions if isinstance(action, ReadCampaignRecords)]


def test_that_a_lost_leader_has_ended_is_remembered_when_the_records_still_show_it() -> None:
    play = election.member(2, connect=election.idle, leads=False).run(0.05)
    play.state = replace(play.state, lookup=Lookup(pending=999))
    play.handle(LeaderLocationRead(999, election.PUBLISHED))
    assert play.state.attempts.answer(election.FIRST) is Answer.ENDED
