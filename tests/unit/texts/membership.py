"""The membership machine of a leader, told by text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.agents import STEPPED, LeaveReason, Reason, WorkerFailure, node_of
from slurm_elastic.rendezvous.membership.config import Base, OnTie, Settings
from slurm_elastic.rendezvous.membership.events import (
    Claim,
    Claimed,
    Closed,
    Connected,
    Decision,
    Disconnected,
    Drop,
    Ended,
    Event,
    Finish,
    Finished,
    Gone,
    Held,
    Holding,
    Interrupt,
    Joined,
    Leaving,
    Left,
    NodesDown,
    Ponged,
    Probed,
    Publish,
    Resend,
    Resign,
    Retire,
    Send,
    SignsOfLife,
    Stopping,
    Tick,
    Waiting,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.leader_change import blocks_election, missing
from slurm_elastic.rendezvous.membership.stragglers import Collective, WorkerPosition
from tests.unit.rendezvous.helpers.scenario import Scenario, candidate, failed
from tests.unit.texts.cases import events, number, words

EACH = r"(?P<each>\S+(?: \S+)*?)"
ALL = r"(?P<names>\S+(?: \S+)*?)"
MORE = r"(?:, (?P<more>.*))?"
ROUND = r"(?: of round (?P<round_>\d+))?"


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, names(text)))


READ: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": "yes".__eq__,
    "Reason": Reason,
    "OnTie": OnTie,
    "frozenset[str]": lambda text: frozenset(names(text)),
    "tuple[str, ...]": names,
    "tuple[int, ...]": numbers,
    "tuple[int, ...] | range": numbers,
    "tuple[tuple[int, float], ...]": lambda text: tuple(
        (int(size), float(seconds)) for size, _, seconds in (each.partition(":") for each in names(text))
    ),
}
"""How the value of a setting is read, by its type."""


def origin(last_round: int | None, before: str, inventories: object, failed: bool) -> str:
    """An origin that shows what it was chosen from."""
    return f"{before}/{last_round}{' failed' * failed}:{'+'.join(sorted(inventories))}"  # type: ignore[call-overload]


def settings(given: str) -> dict[str, Any]:
    """Read settings, the last round, and how the workers and the origins are."""
    types = {field.name: str(field.type) for field in fields(Settings)}
    found: dict[str, Any] = {"answers": "stop at a step" in given}
    for name, value in re.findall(r"(\w+)=(\S+)", given):
        if name == "last_round":
            last, members, leader = value.split(":")
            found["base"] = Base(int(last), names(members), leader)
            found |= {"claimed": False, "first_round": int(last) + 1}
            found["first_reason"] = Reason.NODE_LOST
        elif name == "origins":
            chosen = iter(value.split(","))
            found["choose_origin"] = origin if value == "shown" else lambda *_, chosen=chosen: next(chosen)
        else:
            found[name] = READ[types[name]](value)
    return found


def failure_of(name: str, more: str | None) -> WorkerFailed:
    event, given = failed(name), words(more)
    round_ = number(given.pop("in", "round 0"))
    types = {field.name: str(field.type) for field in fields(WorkerFailure)}
    changes = {key: not value if types[key] == "bool" else READ[types[key]](value) for key, value in given.items()}
    return replace(event, round=round_, failure=replace(event.failure, **changes))  # type: ignore[arg-type]


def connected(name: str, more: str | None) -> Connected:
    given = words(more, "coming", "running", "over")
    return Connected(name, number(given.get("running")), "coming" in given, "over" in given)


def position(text: str) -> WorkerPosition:
    found = re.fullmatch(
        r"rank (\d+) at step (\d+)(?: in (\w+) (\d+))?(?: (in|outside) a collective)?(?: at (.*))?", text
    )
    assert found is not None, text
    rank, step, operation, count, inside, place = found.groups()
    collectives = (Collective("0", int(count), operation),) if operation else ()
    return WorkerPosition(int(rank), int(step), None if inside is None else inside == "in", place or "", collectives)


EVENTS: dict[str, Callable[..., Event]] = {
    f"{EACH} connects?{MORE}": connected,
    f"{EACH} disconnects?": Disconnected,
    f"{EACH} (?:leaves|leave)(?:, in (?P<seconds>.*) s)?: (?P<why>.*)": lambda name, seconds, why: Leaving(
        name, LeaveReason(why), number(seconds)
    ),
    f"{EACH} (?:has|have) left(?P<stopped>, stopped)?: (?P<why>.*)": lambda name, stopped, why: Left(
        name, LeaveReason(why), stopped is not None
    ),
    f"{EACH} can stop (?:after step (?P<step>\\d+)|nowhere){ROUND}": lambda name, step, round_: Held(
        name, number(round_) or 0, number(step)
    ),
    f"{EACH} answers? probe (?P<probe>\\d+){MORE}": lambda name, probe, more: Ponged(
        name, int(probe), tuple(map(position, more.split("; "))) if more else ()
    ),
    f"{EACH} finish(?:es)?{ROUND}": lambda name, round_: Finished(name, number(round_) or 0),
    f"a worker of {EACH} fails{MORE}": lambda name, more: failure_of(name, more),
    f"{EACH} closes the run": Closed,
    f"the process(?:es)? of {ALL} (?:has|have) ended": lambda names: Gone(frozenset(names.split())),
    f"Slurm says that {ALL} (?:is|are) down": lambda names: NodesDown(frozenset(names.split()) - {"none"}),
    "the term is claimed": Claimed,
    "tick": Tick,
}
"""The events by what they look like; names are those of agents, which are those of their nodes."""


class Leader(Scenario):
    """A leader, what happens to it and what it decides.

    Args:
        given: its settings.
    """

    def __init__(self, given: str) -> None:
        self._lines: list[tuple[float, str]] = []
        known = settings(given)
        self._stop_step = known.pop("answers")
        super().__init__(**known)
        self._start = self.now
        self._events = {
            **EVENTS,
            f"{EACH} joins?{MORE}": self._joined,
            f"{ALL} (?:gives|give) a sign of life": lambda names: SignsOfLife(
                tuple((name, self.now) for name in names.split())
            ),
        }

    def on(self, event: Event) -> tuple[Decision, ...]:
        decisions = super().on(event)
        for decision in decisions:
            if not self._stop_step and isinstance(decision, Send) and isinstance(decision.message, Holding):
                self.on(Held(decision.agents[0], decision.message.round, None))
            else:
                self._lines.append((self.now, shown(decision)))
        return decisions

    def handle(self, event: str) -> list[str]:
        """Return a line for each decision on an event, with its time if time passes."""
        kind, moment, what = (*event.split(" ", 2), "")[:3]
        if kind == "show":
            return [self._shown(event)]
        self._lines.clear()
        then = self._start + float(moment.rstrip(","))
        if what == "the leader is paused":
            self.pause(then - self.now)
        elif kind == "until" or then > self.now:
            self.wait(then - self.now, *re.sub(" (is|are) silent", "", what).split() if kind == "until" else ())
        self.now = then
        passed = len(self._lines)
        if kind == "at":
            for found in events(what, self._events):
                self.on(found)
        return [
            line if passed <= index else f"at {round(at - self._start, 3):g} {line}"
            for index, (at, line) in enumerate(self._lines)
        ]

    def _joined(self, name: str, more: str | None) -> Joined:
        given = words(more, "attempt", "after", "of", "ran", "stepped", "with", "restarts", "cut")
        attempt = self._attempts[name] = number(given.get("attempt")) or self._attempts.get(name, 0) + 1
        cohort, _, size = given.get("of", "").partition(" with ")
        joining = candidate(name, cohort=(cohort, number(size) or 1), domain=name.partition("-")[0] * ("-" in name))
        joining = replace(
            joining,
            ran=STEPPED if "stepped" in given else number(given.get("ran")) or 0.0,
            inventory=given.get("with", ""),
        )
        return Joined(joining, attempt, number(given.get("after")), number(given.get("restarts")) or 0, "cut" in given)

    def _shown(self, what: str) -> str:
        state = self.state
        match what:
            case "show whether the candidate keeps members from each other":
                return "yes" if blocks_election(state) else "no"
            case "show who led":
                return state.base.leader if state.base is not None else "none"
            case "show the time between ticks":
                return f"{next_deadline(state) - state.ticked_at:.3g} s"
        found = {
            "members that are missing": missing(state),
            "agents": state.agents,
            "nodes that are gone": state.gone_nodes,
        }
        return " ".join(sorted(found[what.removeprefix("show the ")])) or "none"


def shown(decision: Decision) -> str:
    """One line for a decision."""
    match decision:
        case Publish(table, seconds):
            more = [f"restarts charged: {table.restarts}"] if table.restarts else []
            more += [f"origin {table.origin}"] if table.origin else []
            more += [f"last failure {table.last_failure}"] if table.last_failure else []
            worked = [f"{size}{f' for {ran:g} s' * (ran < STEPPED)}" for size, ran in table.ran]
            more += [f"worked with {', '.join(worked)} nodes"] if worked else []
            more += [f"not with {', '.join(map(str, table.unusable))}"] if table.unusable else []
            members = " ".join(place.agent for place in table.places)
            return "; ".join([f"round {table.round} begins after {table.reason.value} with {members}", *more])
        case Resend(agent, table):
            return f"{agent} is told its place in round {table.round} again"
        case Interrupt(agents, over):
            more = [f"after step {decision.step}"] if decision.step is not None else []
            more += [f"restarts charged: {over.restarts}"] if over.restarts else []
            more += [f"not usable: {decision.unusable} nodes"] if decision.unusable else []
            late = decision.failure.stragglers if decision.failure is not None else ()
            more += [f"others wait for rank {rank} on {node}" for rank, node in late]
            more += ["on record already"] if decision.on_record else []
            cause = cause_of(over.reason, over.node, over.detail)
            return "; ".join([f"round {over.round} is over for {' '.join(agents) or 'none'}: {cause}", *more])
        case Send((name,), Waiting()):
            return f"{node_of(name)} waits as a spare"
        case Finish(agents, Ended(outcome, failure, detail)):
            more = [f"worker of {failure.node}: {failure.message or failure.summary}"] if failure is not None else []
            return "; ".join(
                [f"the run ends for {' '.join(agents) or 'none'}: {outcome.value}", *filter(None, [detail]), *more]
            )
        case Resign(agents, message):
            gone = f", gone: {' '.join(message.gone)}" if message.gone else ""
            everyone = " and all others" if decision.everyone else ""
            return f"the leader {message.agent} resigns, says so to {' '.join(agents) or 'none'}{everyone}{gone}"
        case Send(agents, Holding(round_, leaving)):
            gone = f"; leaving: {' '.join(leaving)}" if leaving else ""
            return f"{' '.join(agents)} are asked where round {round_} can stop{gone}"
        case Send(agents, Stopping(round_, step, reason, node, detail, seconds, leaving)):
            within = f", within {seconds:g} s" if seconds is not None else ""
            gone = f"; leaving: {' '.join(leaving)}" if leaving else ""
            over = f"round {round_} after step {step}{within}: {cause_of(reason, node, detail)}"
            return f"{' '.join(agents)} stop {over}{gone}"
        case Send(agents, Probed(probe, dumps)):
            return f"{' '.join(agents)} must answer probe {probe}{' and write dumps' * dumps}"
        case Drop(agent, _, why):
            return f"{agent} is lost: {why}"
        case Retire(agent, _, reason):
            return f"{agent} has left: {reason.value}"
        case Claim(lost):
            return f"the term is to be claimed{f', {lost} led before' if lost else ''}"
        case _:
            raise AssertionError(decision)


def cause_of(reason: Reason, node: str, detail: str) -> str:
    return reason.value + (f" {node}" if node else "") + (f" ({detail})" if detail else "")
