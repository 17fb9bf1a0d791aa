"""Thousands of agents: no work of the leader grows with their square, and the heartbeat limit fits their number."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.term import CarryOut, RecordsAnswered, Term, UseRecords
from slurm_elastic.rendezvous.membership.agents import AgentInfo
from slurm_elastic.rendezvous.membership.config import Base, Settings
from slurm_elastic.rendezvous.membership.events import Connected, Disconnected, Event, Held, Joined, Returning, Tick
from slurm_elastic.rendezvous.membership.state import Phase, initial_state

PACKAGE = str(Path(membership.__file__).parent)
GROWTH = 4.5
"""Times that the work may grow with four times as many agents."""


class Leader:
    """A leader's term, whose records answer at once."""

    def __init__(self, settings: Settings) -> None:
        self.term: Term = term.initial_term(1, settings, 0.0)
        self.now = 0.0

    def handle(self, event: Event) -> None:
        self.term, actions = term.step(self.term, event, self.now)
        # The last action that waits for the records.
        while actions and isinstance(actions[-1], UseRecords):
            self.term, actions = term.step(self.term, RecordsAnswered(actions[-1], True), self.now)
            actions = tuple(action for action in actions if not isinstance(action, CarryOut))

    def join(self, agents: list[AgentInfo], attempt: int, last_round: int | None = None) -> None:
        for agent in agents:
            self.now += 1e-5
            self.handle(Joined(agent, attempt, last_round))

    @property
    def round(self) -> int:
        table = self.term.membership.table
        return table.round if table is not None and self.term.membership.phase is Phase.RUNNING else -1


def work(size: int) -> list[int]:
    """The calls that a first round, the loss of one, broken connections and a quarter more agents cost."""
    calls = 0

    def counted(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    agents = [AgentInfo(f"n{i}/0.0/1", f"n{i}", i, 1, "", "n", 1) for i in range(size + size // 4)]
    first, more = agents[:size], agents[size:]
    leader = Leader(Settings(1, 2 * size, expected_nodes=tuple(agent.node for agent in first)))
    found = []
    sys.setprofile(counted)
    try:
        for agent in first:
            leader.handle(Connected(agent.agent, None))
        leader.join(first, 1)
        assert leader.round == 0
        found.append(calls)
        leader.handle(Disconnected(first[1].agent))
        leader.now += 0.11
        leader.handle(Tick())
        stayed = [first[0], *first[2:]]
        leader.join(stayed, 2, 0)
        assert leader.round == 1
        found.append(calls - sum(found))
        for agent in stayed:
            leader.handle(Disconnected(agent.agent))
        for agent in stayed:
            leader.handle(Returning(agent.agent))
        leader.handle(Tick())
        assert leader.round == 1
        found.append(calls - sum(found))
        leader.join(more, 1)
        leader.now += 0.06
        leader.handle(Tick())
        # Its workers cannot stop at a step, so the planned end becomes an interruption.
        leader.handle(Held(first[0].agent, 1, None))
        assert leader.round == -1
        leader.join(stayed, 3, 1)
        assert leader.round == 2
        found.append(calls - sum(found))
    finally:
        sys.setprofile(None)
    return found


def test_no_step_grows_with_the_square_of_the_agents() -> None:
    small, large = work(512), work(2048)
    for before, after in zip(small, large, strict=True):
        assert after < GROWTH * before


@pytest.mark.parametrize(("agents", "limit"), [(1, 3.0), (512, 3.0), (2048, 6.0), (8192, 12.0)])
def test_the_heartbeat_limit_fits_the_number_of_agents(agents: int, limit: float) -> None:
    settings = Settings(1, agents)
    assert settings.limit_of(agents) == limit
    # Also for those that are only expected.
    expecting = replace(settings, expected_nodes=tuple(map(str, range(agents))))
    assert initial_state(expecting, 0.0).heartbeat_limit == limit


def test_the_limit_in_force_is_that_of_the_round() -> None:
    agents = [AgentInfo(f"n{i}/0.0/1", f"n{i}", i, 1, "", "n", 1) for i in range(2048)]
    leader = Leader(Settings(2048, 2048))
    leader.join(agents, 1)
    state = leader.term.membership
    assert state.table is not None
    assert state.base is not None
    assert state.table.heartbeat_limit == state.base.heartbeat_limit == state.heartbeat_limit == 6.0
    assert state.tick_interval == 1.0


def test_a_leader_that_follows_waits_as_long_as_members_of_the_last_round_take_to_stop() -> None:
    base = Base(0, ("a", "b"), "a", heartbeat_limit=12.0)
    assert initial_state(Settings(1, 2, base=base), 0.0).heartbeat_limit == 12.0
