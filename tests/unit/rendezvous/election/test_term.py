"""What a leader of very many finds out while it forms a round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.term import Answered, Ask, Question, TermAction, TermEvent
from slurm_elastic.rendezvous.membership.config import Base, Settings
from slurm_elastic.rendezvous.membership.events import Connected, Joined, SignsOfLife, Tick
from tests.unit.rendezvous.helpers.scenario import candidate


class Play:
    """A leader on n1, whose records answer what a test lets them."""

    def __init__(self, **settings: object) -> None:
        self.now = 1000.0
        options = {"min_nodes": 1, "max_nodes": 8, "agent": "n1", **settings}
        self.term = term.initial_term(7, Settings(**options), self.now)  # type: ignore[arg-type]
        self.on(Tick())

    def on(self, event: TermEvent) -> list[TermAction]:
        self.term, actions = term.step(self.term, event, self.now)
        return [*actions]

    def join(self, *names: str) -> list[TermAction]:
        return [action for name in names for action in self.on(Joined(candidate(name), 1))]

    def wait(self, seconds: float) -> list[TermAction]:
        """Time goes by, in which all agents give signs of life."""
        actions: list[TermAction] = []
        end = self.now + seconds
        while self.term.deadline <= end:
            self.now = max(self.now, self.term.deadline)
            actions += self.on(SignsOfLife(tuple((name, self.now) for name in self.term.membership.agents)))
            actions += self.on(Tick())
            assert self.term.deadline > self.now, "it would look at its clock without end"
        self.now = end
        return actions


def probed(actions: list[TermAction]) -> list[tuple[str, ...]]:
    """The members whose nodes are asked, by question."""
    return [action.names for action in actions if isinstance(action, Ask) and action.question is Question.ENDED]


def test_thousands_of_missing_members_may_come_by_themselves_before_they_are_probed() -> None:
    members = tuple(f"n{rank}" for rank in range(4608))
    play = Play(base=Base(4, members, "n0"), first_round=5, claimed=False)
    assert probed(play.wait(0.9)) == []
    play.join("n2")
    assert probed(play.wait(0.2)) == [tuple(name for name in members if name != "n2")]
    play.on(Answered(Question.ENDED, frozenset()))
    assert probed(play.wait(0.9)) == []
    play.on(Answered(Question.GONE, frozenset(members[3:])))
    play.on(Answered(Question.ENDED, frozenset()))
    assert probed(play.wait(0.2)) == [("n0", "n1")]


@pytest.mark.parametrize("agent", ["m0", "coordinator"])
def test_members_that_come_one_after_the_other_are_not_all_looked_at_each_time(agent: str) -> None:
    class Members(tuple[str, ...]):
        """Names that count how often they are walked over or searched."""

        walks = 0

        def __iter__(self) -> Iterator[str]:
            Members.walks += 1
            return super().__iter__()

        def __contains__(self, name: object) -> bool:
            return name in iter(self)

    count = 400
    members = Members(f"m{number}" for number in range(count))
    base = Base(4, members, members[0])
    play = Play(base=base, first_round=5, claimed=False, agent=agent, max_nodes=count)
    # One of those that come last has the first rank.
    for name in reversed([*members]):
        play.on(Connected(name, running=None))
        play.join(name)
    assert play.term.membership.claiming
    assert Members.walks < 20
