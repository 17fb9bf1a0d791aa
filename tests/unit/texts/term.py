"""The term of a leader on n1, told by text: what it writes down, what it tells, and what it finds out."""

from __future__ import annotations

import re
from collections.abc import Callable

from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.term import Operation, Question, TermAction, TermEvent, UseRecords
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.events import Joined, SignsOfLife, Tick
from tests.unit.rendezvous.helpers.scenario import candidate
from tests.unit.texts import membership
from tests.unit.texts.cases import events
from tests.unit.texts.membership import ALL, EACH

OPERATIONS = {
    Operation.TAKE: "claim the term",
    Operation.CONFIRM: "is the last round still the newest?",
    Operation.PUBLISH_ENDPOINT: "write down where this leader is",
    Operation.LEADS: "is the term the newest?",
    Operation.WRITE_ROUND: "write round {0.round} down",
    Operation.FINISH: "write down that the run has ended",
}
WATCHING = " (nothing waits for it)"
QUESTIONS = {
    Question.ENDED: "have their processes ended: {}?",
    Question.DISCONNECTED: "has the process of {} ended?",
    Question.GONE: "Slurm, which of them are gone: {}?",
    Question.DOWN: "Slurm, which nodes are down: {}?",
}
SHOWN: dict[type, Callable[..., str]] = {
    term.UseRecords: lambda use: f"records: {OPERATIONS[use.operation].format(*use.subject)}{WATCHING * use.watching}",
    term.CarryOut: lambda out: f"{'log and tell' if out.log else 'tell'}: {membership.shown(out.decision)}",
    term.Ask: lambda ask: QUESTIONS[ask.question].format(" ".join(ask.names)),
    term.StepDown: lambda down: f"step down{' and fail' * down.failed}{f': {down.why}' if down.why else ''}",
}
"""What an action looks like."""


def some(names: str) -> frozenset[str]:
    return frozenset(names.split()) - {"none"}


class Leader:
    """A leader whose records answer what a text lets them.

    Args:
        given: its settings.
    """

    def __init__(self, given: str) -> None:
        self.now = self._start = 1000.0
        known = membership.settings(given)
        del known["answers"]
        self.term = term.initial_term(7, Settings(**{"min_nodes": 1, "max_nodes": 8, "agent": "n1", **known}), self.now)
        self._actions: list[tuple[float, TermAction]] = []
        self._asked: list[UseRecords] = []
        self._events: dict[str, Callable[..., TermEvent]] = {
            f"{EACH} joins?": lambda name: Joined(candidate(name), 1),
            "the records (?P<answer>allow|refuse) it": lambda answer: term.RecordsAnswered(
                self._asked[-1], answer == "allow"
            ),
            "the records allow the first of it once more": lambda: term.RecordsAnswered(self._asked[0], True),
            "the records fail: (?P<why>.*)": lambda why: term.RecordsFailed(why),
            f"of those that were asked {ALL} (?:has|have) ended": lambda names: term.Answered(
                Question.ENDED, some(names)
            ),
            f"Slurm says that {ALL} (?:is|are) gone": lambda names: term.Answered(Question.GONE, some(names)),
            f"the process of {EACH} has ended": lambda name: term.Answered(Question.DISCONNECTED, frozenset({name})),
            "time passes": Tick,
            **membership.EVENTS,
        }

    def _on(self, event: TermEvent) -> None:
        self.term, actions = term.step(self.term, event, self.now)
        self._actions += [(self.now, action) for action in actions]
        self._asked += [action for action in actions if isinstance(action, UseRecords)]

    def handle(self, event: str) -> list[str]:
        """Return a line for each action on an event; the records allow what they are asked, if the event says so."""
        kind, moment, what = (*event.split(" ", 2), "")[:3]
        state = self.term.membership
        shown = {"are gone": state.gone, "may still have workers": state.lingering}
        if kind == "show":
            return [" ".join(sorted(shown[event.removeprefix("show the members that ")])) or "none"]
        self._actions.clear()
        then = self._start + float(moment)
        while kind == "until" and not self.term.over and self.term.deadline <= then:
            self.now = max(self.now, self.term.deadline)
            self._on(SignsOfLife(tuple((name, self.now) for name in self.term.membership.agents)))
            self._on(Tick())
            assert self.term.over or self.term.deadline > self.now, "it would look at its clock without end"
        self.now = then
        if kind == "at":
            what, more = re.subn(", the records allow all", "", what)
            for found in events(what, self._events):
                self._on(found)
            while more and self._actions and isinstance(self._actions[-1][1], UseRecords):
                self._on(term.RecordsAnswered(self._asked[-1], True))
        return [
            f"{f'at {round(moment - self._start, 3):g} ' * (kind == 'until')}{SHOWN[type(action)](action)}"
            for moment, action in self._actions
        ]
