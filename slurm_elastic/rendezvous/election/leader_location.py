"""The possible endpoints of a run's leader, and a follower's knowledge of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.election.policy import Successor, newest_order
from slurm_elastic.rendezvous.membership import replace
from slurm_elastic.rendezvous.records.api import Record
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import Assignment


@dataclass(frozen=True, slots=True)
class LeaderLocation:
    """The possible endpoints of a leader, by the records.

    Attributes:
        endpoints: in the order in which to try them.
        published: True if a leader has published its endpoint; False if the endpoints are those where the job's
            shape lets agents expect one.
        successors: the members of the last round on record, by rank.
        round: its number, -1 without one.
        refusal: why the agent that should lead cannot, for a person to fix; empty if none has said so.
        leading: the endpoint of the leader that wrote that round, as its record has it; None if that leader was of
            another incarnation.
    """

    endpoints: tuple[Endpoint, ...] = ()
    published: bool = False
    successors: tuple[Successor, ...] = ()
    round: int = -1
    refusal: str = ""
    leading: Record | None = None


@dataclass(frozen=True)
class Leadership:
    """The knowledge of a follower about its leader, and about the agents that may lead next.

    Attributes:
        term: of the leader that gave the last assignment, 0 before the first; no earlier leader counts any more.
        leader, node: that leader's agent and node.
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
    node: str = ""
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
        return replace(
            self,
            term=message.epoch,
            leader=message.leader,
            node=message.leader_node,
            successors=message.successors,
            round=message.round,
            members=message.nodes,
            leaving=frozenset(),
            gone=frozenset(),
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
        """The agents that may follow the leader, the first to campaign first, if the records say this."""
        return newest_order(self.successors, self.round, seen.successors, seen.round)
