"""The term that a candidate would lead in, by what the records show."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_elastic.rendezvous.election.campaign import (
    CampaignRecords,
    ElectionConfig,
    LeaderLoss,
    another_has_claimed,
    locate,
    plan,
)
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.config import Base, Settings
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.messages import Successor

LOST = LeaderLoss(Reason.NODE_LOST, gone=frozenset({"n1/7.0/1"}), round=3)
ENDPOINT = {"agent": "n1/7.0/1", "address": "n1", "port": 5, "epoch": 2}


def situation(incarnation: str = "7.0") -> Situation:
    places = [
        {"agent": f"n{rank}/7.0/{rank}", "node": f"n{rank}", "address": f"n{rank}", "standby_port": rank}
        for rank in (1, 2)
    ]
    record = {"scope": incarnation, "leader": "n1/7.0/1", "restarts": 4, "endpoint": ENDPOINT, "places": places}
    return Situation(ENDPOINT, 3, record)


def recorded(incarnation: str, **more: Any) -> CampaignRecords:
    """The same, with more in the record of the round."""
    return CampaignRecords(2, Situation(ENDPOINT, 3, {**(situation(incarnation).round or {}), **more}))


SEEN = CampaignRecords(2, situation())


def config(agent: str = "n2/7.0/2", reason: Reason = Reason.START, **changes: Any) -> ElectionConfig:
    settings = Settings(1, 8, agent=agent, expected_nodes=("n1", "n2"), first_reason=reason)
    return ElectionConfig(incarnation="7.0", settings=settings, endpoints=(), **changes)


def test_a_term_follows_the_newest_on_record() -> None:
    campaign = plan(config(), SEEN, LOST)
    settings = campaign.settings
    assert (campaign.term, campaign.follows, campaign.endpoints["n2/7.0/2"]) == (3, 3, ("n2", 2))
    assert settings.base == Base(3, ("n1/7.0/1", "n2/7.0/2"), "n1/7.0/1")
    assert (settings.first_round, settings.first_reason) == (4, Reason.NODE_LOST)
    assert (settings.gone, settings.claimed, settings.expected_nodes) == (LOST.gone, False, ())


@pytest.mark.parametrize(
    ("agent", "has_workers", "restarts"), [("n2/7.0/2", True, 4), ("n9/7.1/9", True, 0), ("n9/7.1/9", False, 4)]
)
def test_who_finds_no_member_left_begins_anew_and_an_agent_without_workers_does_not_know(
    agent: str, has_workers: bool, restarts: int
) -> None:
    assert plan(config(agent, has_workers=has_workers), SEEN, LOST).settings.first_restarts == restarts


@pytest.mark.parametrize("incarnation", ["7.0", "7.9"])
def test_the_last_failure_is_known_also_of_another_incarnation(incarnation: str) -> None:
    failed = recorded(incarnation, last_failure="import | 1")
    assert plan(config(), failed, LOST).settings.first_failure == "import | 1"
    assert plan(config(), SEEN, LOST).settings.first_failure == "", "as a release before this one has written it"


@pytest.mark.parametrize(("incarnation", "unusable"), [("7.0", (3,)), ("7.9", ())])
def test_numbers_of_nodes_that_worked_are_known_also_of_another_incarnation(
    incarnation: str, unusable: tuple[int, ...]
) -> None:
    settings = plan(config(), recorded(incarnation, ran=[[2, 1e9]], unusable=[3]), LOST).settings
    assert (settings.first_ran, settings.first_unusable) == (((2, 1e9),), unusable)


def test_silent_members_are_named() -> None:
    loss = LeaderLoss(Reason.NODE_LOST, silent=frozenset({"n1/7.0/1"}))
    assert plan(config(), SEEN, loss).settings.silent == {"n1/7.0/1"}


@pytest.mark.parametrize("reason", [Reason.START, Reason.REQUEUED])
def test_a_round_of_another_incarnation_is_followed_by_a_first_round(reason: Reason) -> None:
    seen = CampaignRecords(0, situation("7.9"))
    campaign = plan(config(reason=reason), seen, LeaderLoss(Reason.NODE_LOST))
    settings = campaign.settings
    assert (campaign.term, settings.first_round, settings.first_reason, settings.base) == (1, 4, reason, None)
    assert settings.expected_nodes == ("n1", "n2")


def test_records_that_show_an_older_round_than_this_agent_was_in_are_not_those_of_the_run() -> None:
    loss = LeaderLoss(Reason.NODE_LOST, round=4)
    with pytest.raises(ValueError, match=r"^/run shows no round 4, in which this agent was: on n2 it is another"):
        plan(config(directory="/run"), SEEN, loss)


def test_a_term_that_was_claimed_and_whose_leader_is_not_published_is_seen() -> None:
    assert another_has_claimed(config(), SEEN) is None
    assert another_has_claimed(config(), CampaignRecords(3, situation())) == 3
    assert another_has_claimed(config(), CampaignRecords(1, Situation(None, None, None))) == 1
    assert another_has_claimed(config(), CampaignRecords(0, Situation(None, None, None))) is None


def test_the_leader_is_where_the_records_say_or_else_where_it_is_expected() -> None:
    expected = (("n1", 1), ("n1", 2))
    expecting = config(expected=expected)
    assert locate(expecting, Situation(None, None, None)) == LeaderLocation(expected)
    successors = (Successor("n1/7.0/1", "n1", 1), Successor("n2/7.0/2", "n2", 2))
    found = LeaderLocation((("n1", 5),), True, successors, 3, leading=ENDPOINT)
    assert locate(expecting, situation()) == found


def test_the_record_of_a_known_round_is_not_needed_again() -> None:
    known = locate(config(), situation())
    assert locate(config(), Situation(ENDPOINT, 3, None), known) == known
    newer = {**ENDPOINT, "address": "n2", "epoch": 3}
    assert locate(config(), Situation(newer, 3, None), known).endpoints == (("n2", 5),)
    # A superseded leader may publish its endpoint after the leader of the newest round.
    older = {**ENDPOINT, "address": "n9", "epoch": 1}
    assert locate(config(), Situation(older, 3, None), known).endpoints == (("n1", 5),)
    assert locate(config(), situation(), LeaderLocation(round=2)) == known
