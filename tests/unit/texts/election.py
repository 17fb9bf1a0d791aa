"""The election as one agent decides it, told by text, against a network and records that the text describes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slurm_elastic.rendezvous.election import events
from slurm_elastic.rendezvous.election.campaign import CampaignRecords
from slurm_elastic.rendezvous.election.events import CutOff, LeaderEvent, LeaderLost, Unreachable
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.membership.events import Connected, Outcome
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.messages import Endpoint, Heartbeat, LeaderMessage
from tests.unit.rendezvous.helpers.election import CANDIDATE, OWN, PLACED, PUBLISHED, RECORDED, TOLD, Play, Result, role
from tests.unit.texts import cases, follower, term


def agent(name: str) -> str:
    return f"{name}/0.0/{name[1:]}"


def agents(names: str) -> tuple[str, ...]:
    return tuple(map(agent, filter(None, names.split(","))))


def endpoint(name: str) -> Endpoint:
    return name, int(name[1:])


def outcome(text: str) -> Result:
    """Read what an attempt to connect comes to, such as `silent`, `leads:2`, or `ended/0.3` after 0.3 s."""
    what, _, seconds = text.partition("/")
    kind, _, term = what.partition(":")
    return float(seconds or (what == "silent")), int(term) if term else Answer[kind.upper()]


GIVEN = {"n1", "n2", "n3", "itself", "others", "endpoint", "expected", "successors", "records"}
GIVEN |= {"term", "lost", "gone", "leaving", "connect_timeout"}
"""What may be given, with `@` and a moment for what is so from then on."""


class Agent(Play):
    """An agent that is a member of round 0 of n1, n2, n3, which n1 has led in term 1, or that knows nothing.

    Args:
        given: its name, what it knows, what is at each endpoint, maybe from a moment on, and what the records say.
    """

    def __init__(self, given: str) -> None:
        self._given = dict(re.findall(r"(\S+?)=(\S+)", given))
        assert {key.partition("@")[0] for key in self._given} <= GIVEN, given
        knows = "knows nothing" not in given and "follows" not in given
        told = replace(TOLD, term=int(self._given.get("term", 1))).leaves(agents(self._given.get("leaving", "")))
        if "resigned" in given:
            told = told.resigns(agent("n1"), agents(self._given.get("gone", "")), endpoint("n1"))
        config: dict[str, Any] = {"join_timeout": float(self._given.get("connect_timeout", 60.0))}
        config |= {"leads": "never leads" not in given}
        super().__init__(
            agent(given.partition(",")[0]), self._located, self._reached, told if knows else None, **config
        )
        self.records = self._recorded
        if knows:
            self.lose(endpoint(self._given.get("lost", "n1")))
        if "follows" in given:
            self.run(0.5)
            for event in (events.Join(CANDIDATE), events.Received(self._number, PLACED)):
                self.handle(event)
        self._role = self._doing

    def _at(self, name: str, now: float) -> str | None:
        """What is given under a name at a moment, as in `n2=ended n2@6=leads:2`."""
        known = [
            (float(key.partition("@")[2] or 0), value)
            for key, value in self._given.items()
            if key.split("@")[0] == name
        ]
        return max(((since, value) for since, value in known if since <= now), default=(0.0, None))[1]

    def _located(self, now: float) -> LeaderLocation:
        if (found := self._at("expected", now)) is not None:
            return LeaderLocation((endpoint(found),))
        found = self._at("endpoint", now)
        later = PUBLISHED if found in (None, "n1") else replace(PUBLISHED, endpoints=(endpoint(str(found)),))
        return replace(later, successors=later.successors[1:]) if "successors" in self._given else later

    def _reached(self, where: Endpoint, now: float) -> Result:
        name = "itself" if where == OWN else where[0]
        return outcome(self._at(name, now) or self._at("others", now) or "silent")

    def _recorded(self) -> CampaignRecords:
        records = self._given.get("records", "1")
        if records == "claimed":
            return CampaignRecords(1, Situation(None, None, None))
        if records in ("none", "unreadable"):
            return CampaignRecords(
                0, Situation({"epoch": "?"}, 0, {}) if records == "unreadable" else Situation(None, None, None)
            )
        return CampaignRecords(int(records), RECORDED)

    @property
    def _number(self) -> int:
        assert self.state.link is not None
        return self.state.link.number

    @property
    def _campaign(self) -> int:
        assert self.state.campaign is not None
        return self.state.campaign.number

    @property
    def _doing(self) -> str:
        link = self.state.link
        where = "" if link is None else ", linked to " + ("itself" if link.endpoint == OWN else link.endpoint[0])
        return role(self.state) + where

    def _events(self) -> dict[str, Callable[..., events.Event]]:
        def received(message: LeaderMessage) -> events.Event:
            return events.Received(self._number, message)

        return {
            "it leaves: (?P<why>.*)": lambda why: events.SendToLeader(
                messages.Leaving(self.state.config.agent, LeaveReason(why))
            ),
            "it joins": lambda: events.Join(CANDIDATE),
            "the term is claimed": lambda: events.LeaderClaimed(self._campaign),
            "its own leader ends(?:: (?P<why>.*))?": lambda why: events.LeaderEnded(self._campaign, why or ""),
            "the records cannot be read: (?P<why>.*)": lambda why: events.CampaignRecordsRead(
                self.state.numbers + 1, None, why
            ),
            "its link breaks": lambda: events.LinkClosed(self._number),
            r"it hears the leader(?:, whose limit is (?P<limit>\S+) s)?": lambda limit: received(
                Heartbeat(float(limit)) if limit else Heartbeat()
            ),
            "the leader probes it": lambda: received(messages.Probed(1)),
            "the leader resigns(?:, gone: (?P<gone>.*))?": lambda gone: received(
                messages.Resigned(agent("n1"), agents(gone or ""))
            ),
            "the run has succeeded": lambda: received(messages.Ended(Outcome.SUCCEEDED, None, "")),
        }

    def handle_line(self, event: str) -> list[str]:
        """Return a line for each action on an event but attempts and readings, and one for what the agent is then."""
        kind, moment, what = (*event.split(" ", 2), "")[:3]
        if kind == "show":
            link = self.state.link
            second = "under way" if link is not None and self.state.attempts.is_pending(link.endpoint) else "none"
            return [second if "second" in event else str(len(self.times(events.Connect)))]
        before, then = len(self.actions), float(moment.rstrip(","))
        if what == "it sleeps":
            self.sleep(then - self.now)
        else:
            if kind == "until":
                self.run(then)
            self.now = then
            for found in cases.events(what, self._events()) if kind == "at" else ():
                self.handle(found)
        new = self.actions[before:]
        linked = {at for at, action in new if isinstance(action, events.Send) and isinstance(action.message, Connected)}
        # A link on which nothing comes is replaced again and again.
        lines = [
            (at, line)
            for at, action in new
            if (line := self._shown(action)) and not (at in linked and isinstance(action, events.CloseLink))
        ]
        role, self._role = self._role, self._doing
        return [f"at {round(at, 3):g} {line}" if kind == "until" else line for at, line in lines] + (
            [f"=> {self._role}"] if self._role != role else []
        )

    def _shown(self, action: events.Action) -> str:
        match action:
            case events.ReadCampaignRecords():
                loss = self._losses[-1]
                sides = {"gone": loss.gone, "silent": loss.silent}
                who = "".join(
                    f", {how}: {' '.join(sorted(each[:2] for each in names))}" for how, names in sides.items() if names
                )
                return f"prepare a campaign after round {loss.round}: {loss.reason.value}{who}"
            case events.Lead(_, campaign):
                return f"campaign in term {campaign.term}"
            case events.StopLeading():
                return "step down"
            case events.Deliver(event):
                return told(event)
            case events.Warn(line):
                return f"warn: {line}"
            case events.AnswerProbe():
                return "answer the probe"
            case events.CloseLink(number) if number in self.opened:
                return "close the link"
            case events.Send(_, Connected(_, None)):
                return ""
            case events.Send(number, message):
                more = f", running round {message.running}" if isinstance(message, Connected) else ""
                return f"say on link {number}: {type(message).__name__.lower()}{more}"
            case _:
                return ""


def told(event: LeaderEvent) -> str:
    match event:
        case CutOff(round_, detail=detail):
            return f"stop the workers of round {round_}: {detail}"
        case LeaderLost(why):
            return f"tell the agent: the leader is lost, {why}"
        case Unreachable(why, usage=usage):
            return f"tell the agent: no leader{', a mistake of the user' * usage}, {why}"
        case _:
            return f"tell the agent: {type(event).__name__.lower()}"


class Elector:
    """An agent as the texts play it."""

    def __init__(self, given: str) -> None:
        self._agent = Agent(given)

    def handle(self, event: str) -> list[str]:
        """Return a line for each action on an event."""
        return self._agent.handle_line(event)


def start(given: str) -> cases.Machine:
    """Return an agent in the election, what it says to its leaders, or a candidate or leader in its term."""
    if given.startswith("a follower"):
        return follower.Agent(given)
    return term.Leader(given) if given.startswith("a ") else Elector(given)
