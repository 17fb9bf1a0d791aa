"""The rules by which agents campaign when the leader is lost. Pure.

A campaign does no harm. The candidate collects joins, and may claim the next term only with a majority of the last
round (:mod:`~slurm_elastic.rendezvous.membership.config`). The rules here only make it likely that one agent campaigns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slurm_elastic.rendezvous.membership import Reason

_T = TypeVar("_T")

RESTORE = 0.1
"""Seconds in which a broken link may be restored before workers are stopped; as long as a leader waits for it."""
FENCE = 5 / 6
"""Part of the heartbeat limit after which an agent with a silent leader stops its workers. The leader drops the agent
after the whole limit, when they have stopped."""

BLOCKING_LIMIT = 6.0
"""Seconds for which a candidate that was not in the last round keeps members of it without getting a quorum. Two such
candidates do not know of each other, and would wait for ever, each with some of them; once they are let go, the
members find each other. Longer than it takes a member to stop its workers, and Slurm to say who is gone."""

_STOP = 0.75
"""Seconds in which a leader that has lost its majority notices that and stops its own workers; see UNPLANNED_STOP."""

_TURN, _FIRST_TURN = 0.25, 1.0
"""Seconds by which a later successor waits longer than the one before, and that the second waits for the first."""
_STRANGER = 2.0
"""Seconds that an agent waits which was no member of the last round, as long as one of those may live."""

_FULL_RATE = 512
"""Agents up to which all search at full rate, as those do that may lead next."""
_QUESTIONS = 4096
"""Questions per second that further agents together ask of one agent; the kernel keeps as many connections that wait to
be accepted (net.core.somaxconn, Linux 5.4 and later), and drops packets of further ones."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A member of the last round, and where it listens when it campaigns."""

    agent: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class LeaderLoss:
    """The knowledge of a candidate about the loss of the last leader.

    Attributes:
        reason: why the last leader is followed.
        gone: agents that are gone for certain.
        silent: agents that may live, but were silent for longer than the longest time that a leader waits.
        round: the last one in which this agent was given a place, -1 for none.
    """

    reason: Reason
    gone: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    round: int = -1


def default_leader_limit(heartbeat_limit: float) -> float:
    """Return the seconds of silence after which a leader is lost to its members.

    Longer than the leader takes to find out that it has no majority any more (the heartbeat limit, and the sixth part
    of it between two looks at its clock) and to stop its own workers.
    """
    return heartbeat_limit * 7 / 6 + _STOP


def search_pause(agents: int, agent: str) -> float:
    """Return the least pause in seconds between two questions of a searching agent to the same agent or records.

    It grows with the number of agents, and differs among them, so that those which search at the same time do not ask
    at the same time again.

    Args:
        agents: Number of agents that may search at the same time.
        agent: Identity of the agent that searches.
    """
    return seconds_of_questions(agents) * (0.75 + _share(agent) / 2)


def first_question_delay(agents: int, agent: str) -> float:
    """Return the seconds for which an agent that has lost its leader waits before it asks where the next one is.

    Args:
        agents: Number of agents that have lost the leader at the same time.
        agent: Identity of the agent that waits.
    """
    return seconds_of_questions(agents) * _share(agent)


def seconds_of_questions(agents: int) -> float:
    """Return the seconds over which so many agents spread questions to one agent, or it those to them."""
    return max(0, agents - _FULL_RATE) / _QUESTIONS


def _share(agent: str) -> float:
    """Return a number from 0 to 1, evenly distributed among agents."""
    return zlib.crc32(agent.encode()) / (1 << 32)


def newest_order(announced: Sequence[_T], told_in: int, recorded: Sequence[_T], recorded_in: int) -> Sequence[_T]:
    """Return the agents that may follow the leader, in order, by the newest round that this agent knows of.

    A leader may be lost when it has written down a round that some of its members, or all, were not told of. Agents
    that went by different rounds might each be the first in their own order, campaign, and not look for each other. Nor
    would those that have no place in that round any more; they come last.

    Args:
        told, told_in: what the last leader said, and in which round; empty and -1 if none did.
        recorded, recorded_in: the same of the last round on record.
    """
    if not recorded or (announced and recorded_in <= told_in):
        return announced
    return [*recorded, *(member for member in announced if member not in recorded)]


def campaign_delay(order: Sequence[str], own: str, ended: Collection[str], leaving: Collection[str] = ()) -> float:
    """Return the seconds for which an agent that knows its leader to be lost looks for another before it campaigns.

    Args:
        order: the members of the last round, the first to campaign first; empty if it is not known.
        own: this agent.
        ended: agents whose process is known to have ended, or that have left.
        leaving: agents that are known to leave. None of them campaigns, as it would have to be followed in its turn;
            infinite if this agent is one.
    """
    if own in leaving:
        return math.inf
    if own not in order:
        return 0.0 if all(name in ended for name in order) else _STRANGER
    ahead = sum(name not in ended and name not in leaving for name in order[: order.index(own)])
    return _FIRST_TURN + _TURN * ahead if ahead else 0.0
