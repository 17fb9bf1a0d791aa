"""Campaigns: when an agent campaigns after the loss of the leader, and the term that it would lead in. Pure.

A campaign does no harm. The candidate collects joins, and may claim the next term only with a majority of the last
round (:mod:`~slurm_elastic.rendezvous.membership.config`). The rules here only make it likely that one agent campaigns.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.leader import fenced_records
from slurm_elastic.rendezvous.membership.agents import Reason, node_of
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.records.api import Situation
from slurm_elastic.rendezvous.transport.messages import Endpoint

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
class LeaderLoss:
    """The knowledge of a candidate about the loss of the last leader.

    Attributes:
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
    """
    return seconds_of_questions(agents) * (0.75 + _share(agent) / 2)


def first_question_delay(agents: int, agent: str) -> float:
    """Return the seconds for which one of the agents that have lost their leader waits before it asks for the next."""
    return seconds_of_questions(agents) * _share(agent)


def seconds_of_questions(agents: int) -> float:
    """Return the seconds over which the agents spread their questions to one agent, or it its questions to them."""
    return max(0, agents - _FULL_RATE) / _QUESTIONS


def _share(agent: str) -> float:
    """Return a number from 0 to 1, evenly distributed among agents."""
    return zlib.crc32(agent.encode()) / (1 << 32)


def campaign_delay(order: Sequence[str], own: str, ended: Collection[str], leaving: Collection[str] = ()) -> float:
    """Return the seconds for which an agent that knows its leader to be lost looks for another before it campaigns.

    Args:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionConfig:
    """The settings of the election, which stay the same while the agent runs.

    Attributes:
        incarnation: This agent's incarnation, which the records of rounds name.
        settings: bounds and times of the run, the agent that would lead, the nodes that a first round waits for, and
            why that is formed.
        endpoints: Endpoints on which this agent listens; it connects to itself at the first.
        expected: The endpoints to try before a leader has published one.
        leader_limit: Least silence after which the leader is lost, in seconds.
        has_workers: False for an agent that only leads.
        can_hold: True if the workers of this agent can name a step to stop at.
    """

    incarnation: str
    settings: Settings
    endpoints: tuple[Endpoint, ...]
    expected: tuple[Endpoint, ...] = ()
    leader_limit: float = 4.25
    has_workers: bool = True
    can_hold: bool = False
    directory: str = ""

    @property
    def agent(self) -> str:
        """The identity of this agent."""
        return self.settings.agent

    @property
    def connect_timeout(self) -> float:
        """Seconds for which an agent searches for a leader."""
        return self.settings.join_timeout


@dataclass(frozen=True, slots=True)
class CampaignRecords:
    """The records that an agent has read before it campaigns; `newest_term` is 0 before the first."""

    newest_term: int
    situation: Situation


@dataclass(frozen=True, slots=True)
class Campaign:
    """The term that a candidate claims once it has a quorum of the last round on record, which it `follows`."""

    term: int
    settings: Settings
    follows: int | None
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)


def locate(config: ElectionConfig, situation: Situation, location: LeaderLocation | None = None) -> LeaderLocation:
    """Return where a leader may be, by the records.

    Args:
        location: what this agent knows of a round; if that is the newest, its record is not looked at.

    Raises:
        LookupError, TypeError, ValueError: the records cannot be read.
    """
    if location is None or situation.number != location.round:
        last = fenced_records.last_round(situation, config.incarnation)
        location = LeaderLocation(leading=fenced_records.round_endpoint(situation.round, config.incarnation))
        if last is not None:
            location = dataclasses.replace(location, successors=last.successors, round=last.round)
    endpoint = fenced_records.newer_endpoint(situation.endpoint, location.leading)
    if endpoint is None:
        return dataclasses.replace(location, endpoints=config.expected, published=False)
    place = (str(endpoint["address"]), int(endpoint["port"]))
    return dataclasses.replace(location, endpoints=(place,), published=True)


def another_has_claimed(config: ElectionConfig, seen: CampaignRecords) -> int | None:
    """Return the newest term if an agent has claimed it and has not published its endpoint yet."""
    published = fenced_records.newest_endpoint(seen.situation, config.incarnation)
    # Also in the first term: the agent that all expect to lead may claim it as late as others begin to campaign.
    return seen.newest_term if seen.newest_term != (published.get("epoch") if published else 0) else None


def plan(config: ElectionConfig, seen: CampaignRecords, loss: LeaderLoss) -> Campaign:
    """Return the term that follows the last one, by the records after the leader was lost.

    Raises:
        LookupError, TypeError, ValueError: the records cannot be read, or are not those of the run; one line says why.
    """
    last = fenced_records.last_round(seen.situation, config.incarnation)
    if loss.round > (last.round if last is not None else -1):
        node = node_of(config.settings.agent)
        raise ValueError(
            f"{config.directory} shows no round {loss.round}, in which this agent was: on {node} it is another"
            " directory than on the other nodes, or was emptied; mount the one that they share"
        )
    base = last.base if last is not None else None
    survives = base is not None and config.settings.agent in base.members
    settings = dataclasses.replace(
        config.settings,
        # The first round waits for the nodes of the allocation, a later one for members of the last round only.
        expected_nodes=config.settings.expected_nodes if base is None else (),
        first_round=0 if last is None else last.round + 1,
        first_reason=config.settings.first_reason if base is None else loss.reason,
        # An agent that finds no member of a run left begins it anew. An agent without workers does not know who will
        # come.
        first_restarts=last.restarts if last is not None and (survives or not config.has_workers) else 0,
        first_failure=last.failure if last is not None else "",
        first_ran=last.ran if last is not None else (),
        first_unusable=last.unusable if last is not None else (),
        base=base,
        gone=loss.gone,
        silent=loss.silent,
        claimed=False,
    )
    successors = last.successors if last is not None else ()
    endpoints = {successor.agent: successor.endpoint for successor in successors}
    return Campaign(seen.newest_term + 1, settings, last.round if last is not None else None, endpoints)
