from __future__ import annotations

import pytest

from slurm_elastic.rendezvous.election import campaign
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation, Leadership
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.state import initial_state
from slurm_elastic.rendezvous.transport.messages import Successor

ORDER = ("a", "b", "c")


def test_who_was_no_member_waits_as_long_as_one_of_those_may_live() -> None:
    # The turns of members are text: tests/unit/testdata/election/machine.txt.
    assert [campaign.campaign_delay("abc", "x", ended) for ended in ("ab", "abc")] == [2.0, 0.0]


def test_nobody_is_waited_for_where_nobody_was() -> None:
    assert campaign.campaign_delay((), "x", ()) == 0.0


@pytest.mark.parametrize("limit", [1.0, 3.0, 30.0])
def test_the_times_follow_each_other(limit: float) -> None:
    stop, tick = 0.5, initial_state(Settings(min_nodes=1, max_nodes=1, heartbeat_limit=limit), 0.0).tick_interval
    # A member has no workers any more when its leader gives it up, and a leader none when its members give it up.
    assert limit * campaign.FENCE < limit
    assert limit + tick + stop < campaign.default_leader_limit(limit)


def order_of(told: str, told_in: int, recorded: str, recorded_in: int) -> str:
    """Return who follows whom, of agents whose names have one letter."""
    announced, on_record = (tuple(Successor(name, name, 1) for name in names) for names in (told, recorded))
    leadership = Leadership(successors=announced, round=told_in)
    location = LeaderLocation(successors=on_record, round=recorded_in)
    return "".join(successor.agent for successor in leadership.order(location))


@pytest.mark.parametrize(
    ("told_in", "recorded", "recorded_in", "order"),
    [
        # Written down when its leader was lost, before everybody was told.
        (3, "bca", 4, "bca"),
        # Without those that it had given up.
        (3, "a", 4, "abc"),
        # The record has the lost leader, too.
        (3, "abc", 3, "bc"),
        (3, "", -1, "bc"),
        (3, "ab", 2, "bc"),
    ],
)
def test_who_stands_first_is_the_same_for_all_that_know_of_the_newest_round(
    told_in: int, recorded: str, recorded_in: int, order: str
) -> None:
    assert order_of("bc", told_in, recorded, recorded_in) == order


def test_who_was_told_nothing_goes_by_the_records() -> None:
    assert order_of("", -1, "ab", 0) == "ab"


@pytest.mark.parametrize(("agents", "mean"), [(0, 0.0), (512, 0.0), (1024, 0.125), (16384, 3.875), (102400, 24.875)])
def test_agents_of_a_large_round_search_more_slowly_and_each_at_its_own_rate(agents: int, mean: float) -> None:
    pauses = [campaign.search_pause(agents, f"n{index}/0.0/0") for index in range(200)]
    assert min(pauses) >= 0.75 * mean
    assert max(pauses) <= 1.25 * mean
    assert len(set(pauses)) == (1 if agents <= 512 else 200)


def test_first_questions_are_spread_evenly_over_the_time_that_they_take() -> None:
    assert {campaign.first_question_delay(512, f"n{index}/0.0/0") for index in range(512)} == {0.0}
    agents = 16384
    delays = [campaign.first_question_delay(agents, f"n{index}/0.0/0") for index in range(agents)]
    in_each_second = [sum(second <= delay < second + 1 for delay in delays) for second in range(4)]
    assert sum(in_each_second) == agents
    assert max(in_each_second) <= 4096 * 1.1
