"""The messages that tell agents of a leader's decisions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.identity import node_of
from slurm_elastic.rendezvous.leader.agent_connections import AgentConnections
from slurm_elastic.rendezvous.membership import Decision, Drop, Place, Publish, Resend, Send, State, Table
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.slurm import compress

_LOOPBACK = "127.0.0.1"
_SUCCESSORS = 8
"""Candidates to succeed the leader that an assignment names."""


def send_decision(connections: AgentConnections, epoch: int, state: State, decision: Decision) -> None:
    """Send the messages of a decision.

    Args:
        connections: The connections of the agents.
        epoch: The leader's epoch.
        state: The state of the membership after the decision.
        decision: The decision, which is on record already if it has to be.
    """
    match decision:
        case Publish(table):
            shared = _shared(connections, state, table)
            for rank, place in enumerate(table.places):
                connections.send((place.agent,), _placed(epoch, state, table, rank, shared))
        case Resend(agent, table):
            ranks = [place.rank for place in table.places if place.agent == agent]
            connections.send((agent,), _placed(epoch, state, table, ranks[0], _shared(connections, state, table)))
        case Drop(agent):
            connections.drop(agent)
        case Send(agents, message, everyone):
            connections.send((*agents, *(connections.others(agents) if everyone else ())), message)
        case _:
            pass


@dataclass(frozen=True, slots=True)
class _Shared:
    """The part of an assignment that is the same for all members of a round; made once, since they are many.

    It is kept for members to which the leader sends their assignment again.
    """

    members: str
    successors: tuple[Successor, ...]


def _shared(connections: AgentConnections, state: State, table: Table) -> _Shared:
    if connections.shared is None or connections.shared[0] is not table:
        # An agent that reaches none of these successors reads the others from the records.
        others = (place for place in table.places if place.agent != state.settings.agent)
        members = compress(place.node for place in table.places)
        successors = tuple(_successor(place) for place in islice(others, _SUCCESSORS))
        connections.shared = table, _Shared(members, successors)
    shared: _Shared = connections.shared[1]
    return shared


def _placed(epoch: int, state: State, table: Table, rank: int, shared: _Shared) -> Assignment:
    place, own = table.places[rank], state.settings.agent
    mine = _successor(place)
    among = place.agent == own or mine in shared.successors
    return Assignment(
        attempt=state.agents[place.agent].attempt,
        place=place,
        round=table.round,
        reason=table.reason,
        nodes=len(table.places),
        world_size=table.world_size,
        # The workers of a single node reach the store by the loopback; see `worker_store`.
        store_address=_LOOPBACK if len(table.places) == 1 else table.store_address,
        store_port=table.store_port,
        restarts=table.restarts,
        epoch=epoch,
        leader=own,
        leader_node=node_of(own),
        successors=shared.successors if among else (*shared.successors, mine),
        members=shared.members,
        heartbeat_limit=table.heartbeat_limit,
        origin=table.origin,
    )


def _successor(place: Place) -> Successor:
    return Successor(place.agent, place.address, place.standby_port)
