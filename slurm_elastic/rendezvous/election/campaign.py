"""The term that a candidate would lead in, decided from what the records show. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.election.policy import LeaderLoss
from slurm_elastic.rendezvous.identity import node_of
from slurm_elastic.rendezvous.leader.fenced_records import (
    last_round,
    newer_endpoint,
    newest_endpoint,
    round_endpoint,
)
from slurm_elastic.rendezvous.membership import Reason, Settings
from slurm_elastic.rendezvous.records.api import Record, Situation
from slurm_elastic.rendezvous.transport.connect import Endpoint


@dataclass(frozen=True, slots=True)
class CampaignConfig:
    """The knowledge of a candidate about the run.

    Attributes:
        incarnation: This agent's incarnation, which the records of rounds name.
        settings: bounds and times of the run, and the agent that would lead.
        expected_nodes: the nodes that a first round waits for.
        requeued: True if Slurm has requeued the job of this agent.
        has_workers: False for an agent that only leads.
        node: this agent's node.
        directory: the path of the run directory, for error messages.
    """

    incarnation: str
    settings: Settings
    expected_nodes: tuple[str, ...] = ()
    requeued: bool = False
    has_workers: bool = True
    node: str = ""
    directory: str = ""


@dataclass(frozen=True, slots=True)
class CampaignRecords:
    """The records that an agent has read before it campaigns.

    Attributes:
        newest_term: the highest term taken, 0 before the first.
        situation: the endpoint and the last round.
        last_leader: the record of the newest term; None if there is none or it cannot be read.
    """

    newest_term: int
    situation: Situation
    last_leader: Record | None


@dataclass(frozen=True, slots=True)
class Campaign:
    """The term that a candidate claims once it has a quorum of the last round.

    Attributes:
        term: its number.
        settings: of its membership machine.
        follows: the last round on record, None before the first.
        endpoints: where members of that round listen.
    """

    term: int
    settings: Settings
    follows: int | None
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)


def locate(
    situation: Situation,
    incarnation: str,
    expected: tuple[Endpoint, ...],
    location: LeaderLocation | None = None,
) -> LeaderLocation:
    """Return where a leader may be, by the records.

    Args:
        situation: the endpoint and the last round on record.
        incarnation: This agent's incarnation.
        expected: the endpoints to try before a leader has published one.
        location: what this agent knows of a round; if that is the newest, its record is not looked at.

    Raises:
        LookupError, TypeError, ValueError: the records cannot be read.
    """
    if location is None or situation.number != location.round:
        last = last_round(situation, incarnation)
        location = LeaderLocation(leading=round_endpoint(situation.round, incarnation))
        if last is not None:
            location = dataclasses.replace(location, successors=last.successors, round=last.round)
    endpoint = newer_endpoint(situation.endpoint, location.leading)
    if endpoint is None:
        return dataclasses.replace(location, endpoints=expected, published=False)
    if "refusal" in endpoint:
        return LeaderLocation(refusal=str(endpoint["refusal"]))
    place = (str(endpoint["address"]), int(endpoint["port"]))
    return dataclasses.replace(location, endpoints=(place,), published=True)


def another_has_claimed(config: CampaignConfig, seen: CampaignRecords) -> int | None:
    """Return the newest term if an agent has claimed it and has not published its endpoint yet."""
    published = newest_endpoint(seen.situation, config.incarnation)
    return seen.newest_term if published is not None and seen.newest_term != published.get("epoch") else None


def plan(config: CampaignConfig, seen: CampaignRecords, loss: LeaderLoss) -> Campaign:
    """Return the term that follows the last one.

    Args:
        config: what the candidate knows of the run.
        seen: what the records showed after the leader was lost.
        loss: what the candidate knows of that.

    Raises:
        LookupError, TypeError, ValueError: the records cannot be read, or are not those of the run; one line says why.
    """
    last = last_round(seen.situation, config.incarnation)
    if loss.round > (last.round if last is not None else -1):
        raise ValueError(
            f"{config.directory} shows no round {loss.round}, in which this agent was: on {config.node} it is another"
            " directory than on the other nodes, or was emptied; mount the one that they share"
        )
    base = last.base if last is not None else None
    lost = str(seen.last_leader["agent"]) if seen.last_leader is not None else ""
    survives = base is not None and config.settings.agent in base.members
    reason = loss.reason
    if base is None:
        reason = Reason.REQUEUED if config.requeued else Reason.START
    settings = dataclasses.replace(
        config.settings,
        # The first round waits for the nodes of the allocation, a later one for members of the last round only.
        expected_nodes=config.expected_nodes if base is None else (),
        first_round=0 if last is None else last.round + 1,
        first_reason=reason,
        first_node=node_of(lost) if base is not None else "",
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
    endpoints = {
        successor.agent: (successor.address, successor.port)
        for successor in (last.successors if last is not None else ())
    }
    return Campaign(seen.newest_term + 1, settings, last.round if last is not None else None, endpoints)
