"""Signs of life: everybody is asked in time, few agents together and many in turns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from slurm_elastic.rendezvous.leader.agent_connections import AgentConnections

INTERVAL, TICK = 1.0, 0.5


class Clock:
    now = 100.0


class Connection:
    """Takes heartbeats, and notes when."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.asked = clock, list[float]()

    def send(self, content: bytes) -> None:
        self.asked.append(self.clock.now)

    def close(self) -> None:
        pass


def moments(count: int, seconds: float, step: float = TICK, leaving: bool = False) -> dict[str, list[float]]:
    """When each of `count` agents was asked; one of the others leaves after every call if `leaving`."""
    connections, clock = AgentConnections(), Clock()
    agents = {f"node{number}/1.0/{number}": Connection(clock) for number in range(count)}
    present = [*agents]
    connections.by_agent = dict(agents)  # type: ignore[arg-type]
    while clock.now < 100.0 + seconds:
        connections.beat(clock.now, 3 * INTERVAL)
        if leaving and len(present) > count // 2:
            connections.drop(present.pop(0))
        clock.now += step
    return {agent: agents[agent].asked for agent in present}


@pytest.mark.parametrize("step", [0.5, 0.5001, 0.25, 0.1, 0.01])
@pytest.mark.parametrize("count", [1, 4, 200, 5000])
def test_every_agent_is_asked_once_in_an_interval(count: int, step: float) -> None:
    for asked in moments(count, seconds=10, step=step).values():
        gaps = [later - earlier for earlier, later in pairwise([100.0, *asked])]
        assert max(gaps) <= INTERVAL + TICK
        assert len(asked) <= 10 / (INTERVAL - TICK) + 1


def test_few_agents_are_asked_together_so_that_the_leader_sleeps() -> None:
    assert len({tuple(asked) for asked in moments(16, seconds=10).values()}) == 1


@pytest.mark.parametrize(("count", "turns"), [(400, 1), (1024, 4), (4096, 16), (16384, 64)])
def test_many_agents_are_asked_in_turns_of_about_256(count: int, turns: int) -> None:
    # The first time, when the leader has never asked anybody, it asks all.
    second = Counter(asked[1] for asked in moments(count, seconds=2.5, step=0.001).values())
    assert len(second) == turns
    assert max(second.values()) < 1.5 * count / turns


def test_nobody_is_passed_over_because_others_leave() -> None:
    for asked in moments(1000, seconds=30, leaving=True).values():
        assert max(later - earlier for earlier, later in pairwise(asked)) <= INTERVAL + TICK
