"""The election as one agent decides it: whom it takes for the leader, when it campaigns, and when it steps down."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slurm_elastic.rendezvous.election.actions import AnswerProbe, Connect, ReadLeaderLocation, Warn
from slurm_elastic.rendezvous.election.attempts import Answer
from slurm_elastic.rendezvous.election.campaign import CampaignRecords
from slurm_elastic.rendezvous.election.events import (
    AnnounceLeave,
    CampaignBlocked,
    CampaignRecordsFailed,
    Join,
    LeaderEnded,
    LinkClosed,
    Received,
    TermClaimed,
)
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation, Leadership
from slurm_elastic.rendezvous.election.machine import CAMPAIGN_AGAIN, STEP_DOWN, UNLED
from slurm_elastic.rendezvous.election.policy import BLOCKING_LIMIT, LeaderLoss, Successor
from slurm_elastic.rendezvous.election.state import Role, Search
from slurm_elastic.rendezvous.leader_events import CutOff, LeaderLost, Unreachable
from slurm_elastic.rendezvous.membership import AgentInfo, Connected, LeaveReason, Outcome, Place, Reason
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import Assignment, Ended, Heartbeat, Probed, Resigned
from tests.unit.rendezvous.helpers.election import OWN, Play, Result

FIRST, SECOND, THIRD = ("n1", 1), ("n2", 2), ("n3", 3)
ORDER = tuple(Successor(f"n{rank}/0.0/{rank}", f"n{rank}", rank) for rank in (1, 2, 3))
"""The members of the last round, which the first of them led."""
PUBLISHED = LeaderLocation((FIRST,), published=True, successors=ORDER, round=0)
TOLD = Leadership(1, ORDER[0].agent, "n1", ORDER[1:], 0, endpoint=FIRST)
"""What a member of that round was told."""
PLACE = Place("n3/0.0/3", "n3", rank=2, local_world_size=1, base_rank=2, role="", role_base_rank=2, role_world_size=3)
PLACED = Assignment(
    1, PLACE, 0, Reason.START, 3, 3, "n1", 1, 0, epoch=1, leader=ORDER[0].agent, leader_node="n1", successors=ORDER[1:]
)
RECORDED = Situation(
    {"agent": ORDER[0].agent, "address": "n1", "port": 1, "epoch": 1},
    0,
    {
        "scope": "7.0",
        "leader": ORDER[0].agent,
        "restarts": 0,
        "endpoint": {"agent": ORDER[0].agent, "address": "n1", "port": 1, "epoch": 1},
        "places": [
            {"agent": each.agent, "node": each.address, "address": each.address, "standby_port": each.port}
            for each in ORDER
        ],
    },
)
"""That round, as the records show it."""
CANDIDATE = AgentInfo("n3/0.0/3", "n3", 2, 1, "trainer", "n3", 1)


def refuse(endpoint: Endpoint, now: float) -> Result:
    return 0.0, Answer.ENDED


def cut(endpoint: Endpoint, now: float) -> Result:
    return 1.0, Answer.SILENT


def idle(endpoint: Endpoint, now: float) -> Result:
    """The leader has ended; the others live and do not lead."""
    return 0.0, Answer.ENDED if endpoint == FIRST else Answer.IDLE


def member(rank: int, known: Leadership = TOLD, **arguments: object) -> Play:
    """A member of the last round, which has lost its link to the leader."""
    agent = ORDER[rank - 1]
    play = Play(agent.agent, known=known, **{"locate": lambda now: PUBLISHED, **arguments})  # type: ignore[arg-type]
    play.records = lambda: CampaignRecords(1, RECORDED, {"agent": ORDER[0].agent})
    play.lose(FIRST)
    return play


def campaigning(connect: object = refuse, **arguments: object) -> Play:
    """An agent that campaigns, and has the link to itself."""

    def to_own(endpoint: Endpoint, now: float) -> Result:
        return (0.0, 2) if endpoint == OWN else connect(endpoint, now)  # type: ignore[operator]

    play = member(3, connect=to_own, **arguments)
    while play.state.role is not Role.CAMPAIGNING or play.state.link is None:
        play.run(play.now + 0.1)
        assert play.now < 20.0
    return play


def following(term: int = 1) -> Play:
    """A member of round 0 whose link to the leader has number 1."""

    def connect(endpoint: Endpoint, now: float) -> Result:
        return (0.0, term) if now < 0.5 else (1.0, Answer.SILENT)

    play = Play(locate=lambda now: PUBLISHED, connect=connect).run(0.5)
    assert play.state.link is not None
    play.handle(Join(CANDIDATE))
    play.handle(Received(play.state.link.number, PLACED))
    return play


# When an agent campaigns.


def test_an_agent_that_comes_when_all_members_have_ended_campaigns() -> None:
    play = Play(locate=lambda now: PUBLISHED, connect=refuse).run(1.0)
    assert play.campaigned_at == [0.0]
    assert play.state.role is Role.CAMPAIGNING


def test_no_agent_campaigns_beside_a_leader_that_came_since_its_last_look() -> None:
    def locate(now: float) -> LeaderLocation:
        return replace(PUBLISHED, endpoints=(FIRST if now < 0.2 else SECOND,))

    def connect(endpoint: Endpoint, now: float) -> Result:
        return (0.01, 2) if endpoint == SECOND else (0.3, Answer.ENDED)

    play = Play("n9/0.0/9", locate=locate, connect=connect).run(5.0)
    assert play.campaigned_at == []
    assert play.state.role is Role.FOLLOWING


@pytest.mark.parametrize(("rank", "seconds"), [(2, 0.0), (3, 1.25)])
def test_the_first_campaigns_at_once_and_the_second_when_that_one_had_its_time(rank: int, seconds: float) -> None:
    play = member(rank, connect=idle).run(1.5)
    assert seconds <= play.campaigned_at[0] < seconds + 0.1


@pytest.mark.parametrize(("rank", "seconds"), [(2, 0.0), (3, 1.25)])
def test_a_leader_that_has_resigned_is_followed_at_once(rank: int, seconds: float) -> None:
    play = member(rank, TOLD.resigns(ORDER[0].agent, (), FIRST), connect=idle).run(1.5)
    assert play.campaigned_at[0] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rank", "gone", "leaving", "campaigns"), [(3, (2,), (), True), (3, (), (2,), True), (2, (), (2,), False)]
)
def test_agents_that_are_gone_are_not_waited_for_and_those_that_leave_do_not_campaign(
    rank: int, gone: tuple[int, ...], leaving: tuple[int, ...], campaigns: bool
) -> None:
    known = TOLD.leaves(ORDER[each - 1].agent for each in leaving)
    known = known.resigns(ORDER[0].agent, (ORDER[each - 1].agent for each in gone), FIRST)
    play = member(rank, known, connect=idle).run(20.0)
    assert (play.campaigned_at[:1] == [0.0]) is campaigns


def test_an_agent_that_leaves_does_not_campaign() -> None:
    play = member(2, connect=cut)
    play.handle(AnnounceLeave(LeaveReason.PREEMPTED, None))
    assert play.run(20.0).campaigned_at == []


def test_an_agent_that_never_leads_waits_for_another() -> None:
    assert member(2, connect=idle, campaign=None).run(20.0).campaigned_at == []


def test_a_leader_that_has_ended_is_gone_and_a_silent_one_is_not_waited_for() -> None:
    leader = ORDER[0].agent
    play = member(2, connect=lambda endpoint, now: (0.01, Answer.ENDED if endpoint == FIRST else Answer.IDLE))
    while not play.campaigned_at:
        play.handle_next()
    assert play.loss == LeaderLoss(Reason.NODE_LOST, gone=frozenset({leader}), round=0)

    play = member(2, connect=cut)
    while not play.campaigned_at:
        play.handle_next()
    assert play.loss == LeaderLoss(Reason.NODE_LOST, silent=frozenset({leader}), round=0)
    # Its silence began when it was heard last.
    assert play.campaigned_at[0] == pytest.approx(4.25)


def test_a_leader_that_ends_before_it_gave_an_assignment_is_not_taken_for_the_one_before_it() -> None:
    # The second led after the first was cut off, and is killed before it has published a round: the first may train.
    play = member(3, connect=lambda endpoint, now: (0.0, Answer.ENDED) if endpoint == SECOND else (1.0, Answer.SILENT))
    play.lose(SECOND)
    while not play.campaigned_at:
        play.handle_next()
    assert play.loss.gone == {ORDER[1].agent}


def test_a_run_without_a_leader_is_led_by_an_agent_that_has_waited_for_one() -> None:
    play = Play(locate=lambda now: LeaderLocation((FIRST,)), connect=refuse).run(UNLED + 1.0)
    assert play.campaigned_at[0] == pytest.approx(UNLED, abs=0.1)


@pytest.mark.parametrize("twin", [True, False])
def test_a_run_that_no_agent_has_led_is_not_led_beside_one_of_another_directory(twin: bool) -> None:
    """As where each node has a run directory of its own; later the other leader does not answer, and ends."""

    def connect(endpoint: Endpoint, now: float) -> Result:
        if now > 20.0:
            return (0.0, Answer.ENDED) if now > 25.0 else (1.0, Answer.SILENT)
        return 0.0, Answer.TWIN if twin else Answer.SILENT

    play = Play(locate=lambda now: LeaderLocation((FIRST,)), connect=connect, connect_timeout=30.0)
    play.records = lambda: CampaignRecords(0, Situation({"epoch": "?"}, 0, {}), None)
    play.run(31.0)
    hint = (
        "a run of this id is led from n1:1 by another run directory; give one that all nodes share by --run-dir, or"
        " another --run-id"
    )
    (told,) = play.told
    assert isinstance(told, Unreachable)
    assert (bool(play.campaigned_at), told.usage) == (not twin, twin)
    assert (told.why == hint) is twin
    assert (hint in play.warned) is twin


def test_an_agent_waits_once_for_another_that_has_just_claimed_the_term() -> None:
    play = member(2, connect=idle)
    play.records = lambda: CampaignRecords(2, RECORDED, None)
    play.run(0.5)
    assert play.campaigned_at
    assert play.led == []
    assert play.run(2.0).campaigned_at[1] == pytest.approx(play.campaigned_at[0] + CAMPAIGN_AGAIN)
    assert [campaign.term for campaign in play.led] == [3]


def test_why_no_campaign_is_possible_is_logged_once() -> None:
    play = member(2, connect=idle)
    play.records = lambda: CampaignRecords(0, Situation(None, None, None), None)
    play.run(3.5)
    assert len(play.campaigned_at) == 4
    assert len(play.warned) == 1
    assert "shows no round 0" in play.warned[0]
    number = play.state.numbers + 1
    play.handle(CampaignRecordsFailed(number, "another"))
    assert len(play.warned) == 1


# When an agent steps down.


@pytest.mark.parametrize("left", [False, True])
def test_a_candidate_finds_the_last_leader_that_campaigns_again_unless_it_has_resigned(left: bool) -> None:
    def connect(endpoint: Endpoint, now: float) -> Result:
        return (0.0, 2) if endpoint == FIRST and now > 6.0 else (0.0, Answer.ENDED)

    later = replace(PUBLISHED, endpoints=(SECOND,), successors=ORDER[1:])
    known = TOLD.resigns(ORDER[0].agent, (), FIRST) if left else TOLD
    play = campaigning(connect, known=known, locate=lambda now: later).run(9.0)
    # It is not among those that follow it.
    assert bool(play.stepped_down_at) is not left


@pytest.mark.parametrize("left", [False, True])
def test_an_agent_searches_at_the_last_leader_for_which_it_would_step_down_though_it_has_followed_a_candidate_since(
    left: bool,
) -> None:
    def connect(endpoint: Endpoint, now: float) -> Result:
        if endpoint == OWN:
            return 0.0, 2
        return (0.0, 2) if endpoint == FIRST else (1.0, Answer.SILENT)

    # The candidate had claimed its term and published its endpoint, and lost its power before it wrote a round down.
    known = TOLD.resigns(ORDER[0].agent, (), FIRST) if left else TOLD
    play = member(3, known, connect=connect, locate=lambda now: replace(PUBLISHED, endpoints=(SECOND,)))
    play.lose(SECOND)
    play.run(30.0)
    assert play.state.link is not None
    assert play.state.link.endpoint == (OWN if left else FIRST)
    assert not play.stepped_down_at


def test_a_candidate_steps_down_for_one_that_goes_before_it_and_gives_it_time() -> None:
    play = campaigning(lambda endpoint, now: (0.0, 2 if endpoint == SECOND and now > 6.0 else Answer.ENDED))
    play.run(12.0)
    (moment,) = play.stepped_down_at
    assert not any(moment < again < moment + STEP_DOWN for again in play.campaigned_at)


def test_a_leader_that_has_claimed_its_term_looks_for_no_other() -> None:
    play = campaigning(lambda endpoint, now: (0.0, 2 if endpoint == SECOND and now > 6.0 else Answer.ENDED))
    assert play.state.campaign is not None
    play.handle(TermClaimed(play.state.campaign.number))
    assert play.state.role is Role.LEADING
    assert play.run(12.0).stepped_down_at == []


@pytest.mark.parametrize("blocks", [True, False])
def test_a_candidate_keeps_members_from_each_other_for_a_while_only(blocks: bool) -> None:
    play = campaigning()
    assert play.state.campaign is not None
    number, began = play.state.campaign.number, play.now
    for moment, blocked in ((0.0, True), (4.0, False), (4.1, blocks)):
        play.run(began + moment)
        play.handle(CampaignBlocked(number, blocked))
    play.run(began + 20.0)
    assert play.stepped_down_at == ([pytest.approx(began + 4.1 + BLOCKING_LIMIT)] if blocks else [])


def test_an_agent_that_finds_a_leader_in_the_moment_it_campaigns_steps_down() -> None:
    # Before it has found itself; its first attempt at the other is still under way.
    def connect(endpoint: Endpoint, now: float) -> Result:
        if endpoint == OWN:
            return 1.0, 2
        return (0.5, 2) if endpoint == SECOND else (0.0, Answer.ENDED)

    known = TOLD.resigns(ORDER[0].agent, (ORDER[1].agent,), FIRST)
    play = member(3, known, connect=connect).run(0.4)
    assert play.state.role is Role.CAMPAIGNING
    play.run(0.6)
    assert play.stepped_down_at == [pytest.approx(0.5)]
    assert play.state.role is Role.FOLLOWING


def test_a_leader_that_fails_is_reported_and_one_that_is_superseded_is_not() -> None:
    for problem, told in (("", []), ("the disk is full", [LeaderLost("the disk is full")])):
        play = campaigning()
        assert play.state.campaign is not None
        play.handle(LeaderEnded(play.state.campaign.number, problem))
        assert play.state.campaign is None
        assert play.told == told


# Whom an agent finds.


@pytest.mark.parametrize("healed_at", [0.01, 0.9, 1.1, 2.9, 3.1, 12.3, 27.0])
def test_an_agent_that_searches_through_a_cut_finds_the_leader_within_a_second_of_its_end(healed_at: float) -> None:
    def connect(endpoint: Endpoint, now: float) -> Result:
        return (0.0, 1) if now >= healed_at and endpoint == FIRST else (1.0, Answer.SILENT)

    play = member(2, connect=connect, campaign=None)
    while play.state.link is None:
        play.handle_next()
    assert play.now < healed_at + 1.1


def test_a_leader_that_has_been_followed_counts_no_more() -> None:
    play = member(2, replace(TOLD, term=3), connect=lambda endpoint, now: (0.01, 2), campaign=None).run(3.0)
    assert play.state.role is Role.SEARCHING
    assert play.closed(2)


def test_an_agent_that_finds_no_leader_in_time_says_so() -> None:
    assert play_told(Play(connect=cut, connect_timeout=5.0, campaign=None).run(6.0)) is Unreachable
    play = member(2, connect=cut, connect_timeout=5.0, campaign=None).run(6.0)
    assert play_told(play) is LeaderLost
    assert play.state.role is Role.STOPPED
    assert play.warned == []


def test_an_agent_that_finds_no_leader_for_long_warns_once() -> None:
    play = Play(connect=cut, connect_timeout=60.0, campaign=None).run(50.0)
    assert play.warned == ["no leader found for 10 s: no process listens; this agent tries for 50 s more"]
    assert play.times(Warn) == [pytest.approx(UNLED)]


def test_a_leader_of_another_version_or_one_that_cannot_lead_is_an_error_of_usage() -> None:
    play = Play(locate=lambda now: PUBLISHED, connect=lambda endpoint, now: (0.0, Answer.VERSION)).run(1.0)
    assert play.told == [Unreachable(Answer.VERSION.value, usage=True)]
    play = Play(locate=lambda now: LeaderLocation(refusal="no port is free")).run(1.0)
    assert play.told == [Unreachable("no port is free", usage=True)]


def play_told(play: Play) -> type:
    (told,) = play.told
    return type(told)


# A silent leader, a second link to it, and own pauses.


def test_the_second_link_to_a_silent_leader_is_kept_though_the_leader_has_ended_the_first() -> None:
    play = following()
    play._connect = lambda endpoint, now: (0.1, 1)
    play.run(2.05)
    assert play.state.link is not None
    number = play.state.link.number
    assert play.state.link.reconnect is not None
    play.handle(LinkClosed(number))
    play.run(2.2)
    assert play.state.link is not None
    assert play.state.link.number != number
    assert play.sent(play.state.link.number) == [Connected("n3/0.0/3", 0)]
    play.handle(Received(play.state.link.number, Heartbeat()))
    assert play.sent(play.state.link.number)[1:] == [Heartbeat()]
    assert not play.told[1:]


def test_workers_are_stopped_once_when_no_link_says_anything() -> None:
    play = following().run(2.9)
    assert play.told == [PLACED]
    play.run(4.5)
    assert [event.round for event in play.told if isinstance(event, CutOff)] == [0]


def test_an_agent_that_was_cut_off_answers_by_its_next_join() -> None:
    play = following().run(2.9)
    assert play.state.link is not None
    asked = Received(play.state.link.number, Probed(1))
    play.handle(asked)
    assert len(play.times(AnswerProbe)) == 1
    play.run(play.now + 2.9)
    assert any(isinstance(event, CutOff) for event in play.told)
    play.handle(asked)
    assert len(play.times(AnswerProbe)) == 1
    play.handle(Join(CANDIDATE))
    play.handle(asked)
    assert len(play.times(AnswerProbe)) == 2


def test_workers_are_stopped_when_a_broken_link_is_not_restored() -> None:
    play = following()
    assert play.state.link is not None
    play.handle(LinkClosed(play.state.link.number))
    play.run(0.59)
    assert play.told == [PLACED]
    play.run(0.61)
    assert [event.detail for event in play.told if isinstance(event, CutOff)] == ["the link to the leader is broken"]


@pytest.mark.parametrize(("silent", "cut_off"), [(0.9, False), (1.2, True)])
def test_an_agent_that_was_paused_gives_a_leader_time_that_may_have_been_paused_too(
    silent: float, cut_off: bool
) -> None:
    play = following().sleep(3600.0)
    play.run(play.now + silent)
    assert any(isinstance(event, CutOff) for event in play.told) is cut_off
    assert play.state.link is not None
    play.handle(Received(play.state.link.number, Heartbeat()))
    play.run(play.now + 1.0)
    assert any(isinstance(event, CutOff) for event in play.told) is cut_off


def test_everything_that_fences_goes_by_the_limit_that_the_leader_tells() -> None:
    play = following()
    assert play.state.link is not None
    play.handle(Received(play.state.link.number, Heartbeat(12.0)))
    last_message_at = play.now
    # Half of the limit, five sixths, and what the leader needs to find out by itself.
    play.run(last_message_at + 5.9)
    assert play.state.link.reconnect is None
    play.run(last_message_at + 6.1)
    assert play.state.link.reconnect is not None
    assert not any(isinstance(event, CutOff) for event in play.told)
    play.run(last_message_at + 10.1)
    assert any(isinstance(event, CutOff) for event in play.told)
    play.run(last_message_at + 14.7)
    assert play.state.link is not None
    play.run(last_message_at + 14.8)
    assert play.state.link is None


def test_of_thousands_of_members_on_record_only_the_first_are_looked_for() -> None:
    order = tuple(Successor(f"n{rank}/0.0/{rank}", f"n{rank}", rank) for rank in range(1, 2001))
    location = LeaderLocation((FIRST,), published=True, successors=order, round=0)
    tried: set[Endpoint] = set()

    def dead(endpoint: Endpoint, now: float) -> Result:
        tried.add(endpoint)
        return (0.0, Answer.ENDED) if endpoint[1] <= 100 else (0.01, Answer.IDLE)

    play = Play(locate=lambda now: location, connect=dead)
    play.run(0.9)
    # Those that have ended are passed over, and eight that live are asked.
    assert 8 <= len(tried) <= 110
    assert max(port for _, port in tried) <= 108


def leaderless(agent: str, nodes: int) -> Play:
    """A member of a round of so many, whose leader ended at 0.5 s; the others live, and none leads."""

    def connect(endpoint: Endpoint, now: float) -> Result:
        return (0.0, 1) if now < 0.5 else idle(endpoint, now)

    play = Play(agent, locate=lambda now: PUBLISHED, connect=connect, campaign=None).run(0.5)
    assert play.state.link is not None
    number = play.state.link.number
    play.handle(Join(CANDIDATE))
    play.handle(Received(number, replace(PLACED, nodes=nodes)))
    play.actions.clear()
    play.handle(LinkClosed(number))
    return play.run(10.0)


def questions(play: Play) -> list[float]:
    """When the agent read the records, or tried an endpoint other than that of its former leader."""
    return [
        moment
        for moment, action in play.actions
        if isinstance(action, ReadLeaderLocation) or (isinstance(action, Connect) and action.endpoint != FIRST)
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
    known = replace(TOLD, successors=order, members=16384)
    tried: dict[float, set[Endpoint]] = {}

    def alive(endpoint: Endpoint, now: float) -> Result:
        tried.setdefault(now, set()).add(endpoint)
        return 0.0, Answer.ENDED if endpoint[1] < 10 else Answer.IDLE

    play = Play("n99/0.0/99", locate=lambda now: PUBLISHED, connect=alive, known=known, campaign=None)
    play.state = replace(play.state, search=Search(0.0, FIRST, least_pause=4.0))
    play.run(0.9)
    assert set().union(*tried.values()) == {FIRST, *(("n" + str(rank), rank) for rank in range(2, 11))}
    play.run(4.9)
    assert max(port for _, port in set().union(*tried.values())) == 14


def test_an_agent_of_a_large_run_reads_and_tries_less_often_from_its_start() -> None:
    unled = LeaderLocation((FIRST,))
    play = Play(locate=lambda now: unled, connect=refuse, campaign=None, expected_agents=16384).run(20.0)
    for kind in (ReadLeaderLocation, Connect):
        times = play.times(kind)
        assert len(times) > 3
        assert all(later - sooner >= 2.9 for sooner, later in itertools.pairwise(times))


def test_the_first_successors_of_a_large_round_search_at_full_rate() -> None:
    agent = ORDER[1].agent
    assert questions(leaderless(agent, 16384)) == questions(leaderless(agent, 512))


def test_the_record_of_a_round_is_read_once() -> None:
    play = Play(locate=lambda now: PUBLISHED, connect=cut, campaign=None).run(3.0)
    known = [action.known for _, action in play.actions if isinstance(action, ReadLeaderLocation)]
    assert len(known) > 3
    assert known == [LeaderLocation(), *[PUBLISHED] * (len(known) - 1)]


def test_the_record_of_a_round_is_not_read_where_a_leader_has_told_of_it() -> None:
    newer = replace(PUBLISHED, round=1)
    play = member(3, connect=cut, campaign=None, locate=lambda now: newer).run(1.2)
    known = [action.known for _, action in play.actions if isinstance(action, ReadLeaderLocation)]
    leading = {"address": "n1", "port": 1, "epoch": 1}
    assert known == [LeaderLocation(successors=ORDER[1:], round=0, leading=leading), newer, newer]


def test_an_agent_that_is_always_late_does_not_wait_for_ever_for_a_silent_leader() -> None:
    play = following()
    for _ in range(10):
        play.sleep(1.0)
    assert any(isinstance(event, CutOff) for event in play.told)


def test_a_leader_that_resigns_is_gone_and_searched_for_no_more() -> None:
    play = following()
    assert play.state.link is not None
    play.handle(Received(play.state.link.number, Resigned(ORDER[0].agent, (ORDER[1].agent,))))
    play.handle(LinkClosed(play.state.link.number))
    assert play.campaigned_at == []
    play.run(0.6)
    assert play.loss == LeaderLoss(Reason.NODE_LEFT, gone=frozenset({ORDER[0].agent, ORDER[1].agent}), round=0)


def test_nothing_is_searched_for_when_the_run_has_ended() -> None:
    play = following()
    assert play.state.link is not None
    number = play.state.link.number
    play.handle(Received(number, Ended(Outcome.SUCCEEDED, None, "")))
    play.handle(LinkClosed(number))
    before = len(play.actions)
    play.run(30.0)
    assert play.state.role is Role.STOPPED
    assert len(play.actions) == before
