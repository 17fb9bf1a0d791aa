from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from slurm_elastic.rendezvous.leader.status_collector import StatusCollector
from slurm_elastic.rendezvous.transport import messages
from tests.unit.rendezvous.helpers import virtual_time


class Run:
    """Connections of a run whose agents answer `delay` seconds after they were asked; None for never."""

    def __init__(self, agents: int, delay: Callable[[int], float | None] = lambda index: 0.01) -> None:
        self.delay = delay
        self.nodes = {f"n{index}/7.0/1": f"n{index}" for index in range(agents)}
        self.asked: list[tuple[float, str]] = []
        self.told: dict[str, list[messages.LeaderMessage]] = {}
        self.collector = StatusCollector(self, lambda: self.nodes, self.summary)  # type: ignore[arg-type]

    def summary(self) -> messages.StatusAnswer:
        return messages.StatusAnswer("n0/7.0/1", 3, "running", 1.0, 0, 0)

    def has(self, agent: str) -> bool:
        return True

    def send(self, agents: list[str], message: messages.LeaderMessage) -> None:
        loop = asyncio.get_running_loop()
        for agent in agents:
            if not isinstance(message, messages.StatusRequested):
                self.told.setdefault(agent, []).append(message)
                continue
            self.asked.append((loop.time(), agent))
            delay = self.delay(int(self.nodes[agent][1:]))
            if delay is not None:
                loop.call_later(delay, self.collector.reported, messages.StatusReport(agent, message.request, "{}"))

    async def ask(self, *clients: str) -> None:
        await asyncio.gather(*map(self.collector.ask, clients))

    def answers(self, client: str) -> list[messages.StatusAnswer]:
        return [message for message in self.told[client] if isinstance(message, messages.StatusAnswer)]

    def reports(self, client: str) -> list[str]:
        parts = [message for message in self.told[client] if isinstance(message, messages.StatusPart)]
        assert all(len(part.reports) <= 32 for part in parts)
        return [agent for part in parts for agent, _ in part.reports]


def test_every_agent_is_asked_once_for_all_clients_that_wait() -> None:
    run = Run(100)
    virtual_time.run(run.ask("a", "b", "a"))
    assert sorted(agent for _, agent in run.asked) == sorted(run.nodes)
    for client in ("a", "b"):
        assert sorted(run.reports(client)) == sorted(run.nodes)
        (answer,) = run.answers(client)
        assert (answer.asked, answer.answered, answer.silent, answer.busy) == (100, 100, "", False)
        assert isinstance(run.told[client][-1], messages.StatusAnswer)


def test_agents_that_do_not_answer_in_time_are_named() -> None:
    run = Run(4, lambda index: {1: None, 2: 5.0}.get(index, 0.1))

    async def ask() -> float:
        await run.ask("a")
        taken = asyncio.get_running_loop().time()
        # A report that comes too late reaches no client.
        await asyncio.sleep(10)
        return taken

    assert virtual_time.run(ask()) == pytest.approx(1.5)
    (answer,) = run.answers("a")
    assert (answer.asked, answer.answered, answer.silent) == (4, 2, "n[1-2]")
    assert sorted(run.reports("a")) == ["n0/7.0/1", "n3/7.0/1"]


def test_a_run_without_agents_is_answered_at_once() -> None:
    run = Run(0)
    virtual_time.run(run.ask("a"))
    assert run.answers("a")[0].asked == 0


@pytest.mark.parametrize(("agents", "pause"), [(10, 1.0), (2048, 4.0)])
def test_collections_are_as_far_apart_as_heartbeats_allow(agents: int, pause: float) -> None:
    run = Run(agents)

    async def ask() -> None:
        for number in range(3):
            await run.ask(f"client {number}")

    virtual_time.run(ask())
    begun = sorted({moment for moment, _ in run.asked})
    assert len(run.asked) == 3 * agents
    assert begun == pytest.approx([0.0, pause, 2 * pause])


def test_who_asks_during_a_collection_gets_the_next_one() -> None:
    run = Run(2, lambda index: 0.5)

    async def ask() -> None:
        first = asyncio.create_task(run.ask("a"))
        await asyncio.sleep(0.1)
        await run.ask("b")
        await first

    virtual_time.run(ask())
    assert sorted(run.reports("a")) == sorted(run.reports("b")) == list(run.nodes)
    assert sorted({moment for moment, _ in run.asked}) == [0.0, 1.0]


def test_more_than_sixteen_clients_are_turned_away() -> None:
    run = Run(1)
    virtual_time.run(run.ask(*(f"client {number}" for number in range(17))))
    assert [run.answers(f"client {number}")[0].busy for number in range(17)] == [False] * 16 + [True]
