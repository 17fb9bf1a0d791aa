"""The possible endpoints of a run's leader, a follower's knowledge of it, and attempts to connect. Pure.

A dead node delays no other endpoint.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.records.api import Record
from slurm_elastic.rendezvous.transport.messages import Assignment, Endpoint, Successor


@dataclass(frozen=True, slots=True)
class LeaderLocation:
    """The possible endpoints of a leader, by the records.

    Attributes:
        endpoints: in the order in which to try them.
        published: True if a leader has published its endpoint; False if the endpoints are those where the job's
            shape lets agents expect one.
        successors: the members of the last round on record, by rank.
        round: its number, -1 without one.
        leading: the endpoint of the leader that wrote that round, as its record has it; None if that leader was of
            another incarnation.
    """

    endpoints: tuple[Endpoint, ...] = ()
    published: bool = False
    successors: tuple[Successor, ...] = ()
    round: int = -1
    leading: Record | None = None


@dataclass(frozen=True)
class Leadership:
    """The knowledge of a follower about its leader, and about the agents that may lead next.

    Attributes:
        term: of the leader that gave the last assignment, 0 before the first; no earlier leader counts any more.
        successors: the agents that may follow it, the first to campaign first.
        round: the round of that assignment, -1 before the first.
        members: number of the members of that round, 0 before the first.
        leaving: agents that have announced that they leave, this one too: they do not campaign.
        gone: agents that are gone for good: leaders that have resigned, and members of that round that have said so.
        resigned: True from the moment the leader says that it goes until the next one is found.
        left: the endpoint of the last leader that said so.
        endpoint: the endpoint of the leader that gave the assignment.
    """

    term: int = 0
    leader: str = ""
    successors: tuple[Successor, ...] = ()
    round: int = -1
    members: int = 0
    leaving: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    resigned: bool = False
    left: Endpoint | None = None
    endpoint: Endpoint | None = None

    def placed(self, message: Assignment, endpoint: Endpoint) -> Leadership:
        """Note an assignment that the leader at this endpoint gave."""
        return Leadership(
            term=message.epoch,
            leader=message.leader,
            successors=message.successors,
            round=message.round,
            members=message.nodes,
            left=self.left,
            endpoint=endpoint,
        )

    def leaves(self, agents: Iterable[str]) -> Leadership:
        """Note that these agents have announced that they leave."""
        return replace(self, leaving=self.leaving.union(agents))

    def resigns(self, agent: str, gone: Iterable[str], endpoint: Endpoint) -> Leadership:
        """Note that this leader, at this endpoint, goes, and that these members of its last round are gone."""
        return replace(self, resigned=True, left=endpoint, gone=self.gone.union(gone, (agent,)))

    def recorded(self, seen: LeaderLocation) -> LeaderLocation:
        """The newest round whose record this agent need not read, if the records have said this so far.

        Its leader has told each member what a search needs of that record.
        """
        if self.endpoint is None or not self.successors or seen.round >= self.round:
            return seen
        leading = {"address": self.endpoint[0], "port": self.endpoint[1], "epoch": self.term}
        return LeaderLocation(successors=self.successors, round=self.round, leading=leading)

    def order(self, seen: LeaderLocation) -> Sequence[Successor]:
        """Return the agents that may follow the leader, the first to campaign first, if the records say this.

        The newest round that this agent knows of decides. A leader may be lost when it has written down a round that
        some of its members, or all, were not told of. Agents that went by different rounds might each be the first in
        their own order, campaign, and not look for each other. Nor would those that have no place in that round any
        more; they come last.
        """
        if not seen.successors or (self.successors and seen.round <= self.round):
            return self.successors
        return [*seen.successors, *(member for member in self.successors if member not in seen.successors)]


_SOON, _LATER = 0.03, 0.5
"""Seconds from the start of an attempt to the start of the next one at that endpoint: the pause doubles from the first
to the second where no agent answers, and stays the first where an agent lives that does not lead."""


class Answer(enum.Enum):
    """The answer of the other end, as a failed attempt shows it."""

    ENDED = "no process listens"
    """The node's kernel refuses the connection: the process that listened there has ended."""
    IDLE = "does not lead"
    """An agent of the run listens there, as it has proved."""
    TWIN = "leads by another directory"
    """An agent there claims to lead this run, and has another secret."""
    VERSION = "another version"
    """An agent of this run, which speaks another protocol."""
    SILENT = "no answer"
    """No answer, or one that proves nothing."""


class Tried(NamedTuple):
    """The attempts at one endpoint.

    Attributes:
        number: Number of the attempt that is under way, None if none is.
        pause: Seconds from `began` to the start of the next one.
        answer: The result of the last attempt that failed.
    """

    number: int | None = None
    began: float = -math.inf
    pause: float = _SOON / 2
    answer: Answer | None = None


_NEVER = Tried()


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts to connect since an agent found or lost its leader last; `problem` is that of the newest one."""

    tried: Mapping[Endpoint, Tried] = field(default_factory=dict)
    problem: str = "no process listens"

    def endpoint(self, number: int) -> Endpoint | None:
        """Return the endpoint of an attempt, None if it is none of these."""
        for endpoint, tried in self.tried.items():
            if tried.number == number:
                return endpoint
        return None

    def pending(self) -> tuple[int, ...]:
        """Return the numbers of the attempts that are under way."""
        return tuple(tried.number for tried in self.tried.values() if tried.number is not None)

    def is_pending(self, endpoint: Endpoint) -> bool:
        """Return whether an attempt at this endpoint is under way."""
        return self.tried.get(endpoint, _NEVER).number is not None

    def with_answer(self, answer: Answer) -> frozenset[Endpoint]:
        """Return the endpoints whose newest answer is this one."""
        return frozenset([endpoint for endpoint, tried in self.tried.items() if tried.answer is answer])

    def answer(self, endpoint: Endpoint) -> Answer | None:
        """Return the newest answer of an endpoint, None if there is none."""
        return self.tried.get(endpoint, _NEVER).answer

    def without_answers(self, endpoints: Collection[Endpoint]) -> Attempts:
        """Return these without the answers of some endpoints, where the next attempt may start at once."""
        anew = {
            endpoint: tried._replace(began=-math.inf, answer=None)
            for endpoint, tried in self.tried.items()
            if endpoint in endpoints
        }
        return Attempts({**self.tried, **anew}, self.problem)


def due(attempts: Attempts, endpoints: Iterable[Endpoint], now: float) -> tuple[list[Endpoint], float]:
    """Return the endpoints where another attempt starts now, and when the next one starts at another of them."""
    starting, next_at = [], math.inf
    for endpoint in endpoints:
        tried = attempts.tried.get(endpoint, _NEVER)
        again_at = tried.began + tried.pause
        if tried.number is None and now >= again_at:
            starting.append(endpoint)
        elif tried.number is None:
            next_at = min(next_at, again_at)
    return starting, next_at


def begin(attempts: Attempts, endpoint: Endpoint, number: int, now: float) -> Attempts:
    """Note that an attempt has started."""
    tried = attempts.tried.get(endpoint, _NEVER)._replace(number=number, began=now)
    return Attempts({**attempts.tried, endpoint: tried}, attempts.problem)


def answered(attempts: Attempts, endpoint: Endpoint, answer: Answer, problem: str, least_pause: float) -> Attempts:
    """Note that an attempt at an endpoint has failed; the next starts at least `least_pause` seconds after it."""
    tried = attempts.tried[endpoint]
    pause = _SOON if answer is Answer.IDLE else min(2 * tried.pause, _LATER)
    tried = Tried(None, tried.began, max(pause, least_pause), answer)
    return Attempts({**attempts.tried, endpoint: tried}, problem)
