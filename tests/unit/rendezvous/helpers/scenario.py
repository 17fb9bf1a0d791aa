"""A leader's term told event by event, for tests that read as one line per event."""

from __future__ import annotations

from typing import Any, TypeVar

from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.agents import AgentInfo, WorkerFailure
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.events import Decision, Event, Joined, Send, SignsOfLife, Tick, WorkerFailed
from slurm_elastic.rendezvous.membership.machine import step
from slurm_elastic.rendezvous.membership.state import State, initial_state

Kind = TypeVar("Kind")


def candidate(
    name: str,
    position: int = 0,
    workers: int = 1,
    role: str = "trainer",
    cohort: tuple[str, int] = ("", 1),
    domain: str = "",
) -> AgentInfo:
    return AgentInfo(name, name, position, workers, role, f"{name}.cluster", 20000, 0, *cohort, domain=domain)


def failed(name: str, round_: int = 0) -> WorkerFailed:
    return WorkerFailed(name, round_, WorkerFailure(name, name, rank=3, exit_code=1))


def only(kind: type[Kind], decisions: tuple[Decision, ...]) -> list[Kind]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def sent(kind: type, decisions: tuple[Decision, ...]) -> list[Any]:
    """The decisions that carry a message of this kind."""
    return [decision for decision in only(Send, decisions) if isinstance(decision.message, kind)]


class Scenario:
    """Nodes n0, n1, ... and their leader; agents are named as their nodes.

    Args:
        settings: of the leader.
    """

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.state: State = initial_state(Settings(**{"min_nodes": 1, "max_nodes": 8, **settings}), self.now)
        self._attempts: dict[str, int] = {}

    def on(self, event: Event) -> tuple[Decision, ...]:
        """What the machine decides on an event."""
        self.state, decisions = step(self.state, event, self.now)
        return decisions

    def join(self, *names: str, last_round: int | None = None) -> tuple[Decision, ...]:
        """These agents join, one after the other."""
        decisions: tuple[Decision, ...] = ()
        for name in names:
            self._attempts[name] = self._attempts.get(name, 0) + 1
            decisions += self.on(Joined(candidate(name), self._attempts[name], last_round))
        return decisions

    def wait(self, seconds: float, *silent: str) -> tuple[Decision, ...]:
        """Time goes by, with ticks when the machine wants them; all but the silent ones give signs of life."""
        decisions: tuple[Decision, ...] = ()
        end = self.now + seconds
        while (deadline := next_deadline(self.state)) <= end:
            self.now = max(self.now, deadline)
            self.on(SignsOfLife(tuple((name, self.now) for name in self.state.agents if name not in silent)))
            decisions += self.on(Tick())
            assert next_deadline(self.state) > self.now, "a tick leaves something due"
        self.now = end
        return decisions

    def pause(self, seconds: float) -> None:
        """The leader itself is stopped."""
        self.now += seconds
