"""What an agent is given, and what it learns, to find the leader of its run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.election.policy import Successor, Vacancy, newest_order
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import Placed

__all__ = ["Leadership", "LeaderRefusedError", "MemberSettings", "Whereabouts"]


class LeaderRefusedError(Exception):
    """The agent that should lead cannot, for a reason that a person has to mend."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a leader may be.

    Attributes:
        places: in the order in which to try.
        published: whether a leader has said so, and not just where one is expected.
        successors: the members of the last round on record, by rank.
        round: its number, -1 without one.
    """

    places: tuple[Endpoint, ...] = ()
    published: bool = False
    successors: tuple[Successor, ...] = ()
    round: int = -1


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """How to find and keep the leader.

    Attributes:
        run: run id and incarnation.
        secret: the run's secret.
        agent: own identity.
        locate: says where the leader may be; may block, and is asked again while nobody is found. Raises
            LeaderRefusedError if there will be none.
        own: where this very agent leads or stands, None while it does not.
        addresses: all places that are this very agent.
        stand: stands up to lead, told what is known of those who did; returns
            whether that worked. None for an agent that never leads.
        standing: whether this agent stands without having taken an epoch yet.
        in_the_way: whether it keeps members of the last round from each other by that.
        stand_down: ends that.
        can_hold: whether the workers here can be asked for a step to stop at.
        coming: whether this agent will join soon after it has found the leader.
        connect_timeout: seconds until a leader must be found.
        heartbeat_limit: seconds of silence after which the leader gives up an agent.
        leader_limit: seconds of silence after which the leader is lost.
    """

    run: str
    secret: bytes
    agent: str
    locate: Callable[[], Whereabouts]
    own: Callable[[], Endpoint | None] = lambda: None
    addresses: Callable[[], Collection[Endpoint]] = lambda: ()
    stand: Callable[[Vacancy], Awaitable[bool]] | None = None
    standing: Callable[[], bool] | None = None
    in_the_way: Callable[[], bool] = lambda: False
    stand_down: Callable[[], Awaitable[None]] | None = None
    can_hold: bool = False
    coming: bool = False
    connect_timeout: float = 600.0
    heartbeat_limit: float = 3.0
    leader_limit: float = 4.25


@dataclass(slots=True)
class Leadership:
    """What a member was told of who leads, and who may next.

    Attributes:
        epoch: of the leader that gave the last place, 0 before the first; no earlier one counts any more.
        leader, node: that leader's agent and node.
        successors: who may follow it, the first first.
        round: in which it gave that place, -1 before the first.
        leaving: agents that have said that they go, this one too: they do not stand up to lead.
        gone: members of that round that are gone for good, by the word of a leader that has resigned.
        resigned: whether it has said that it goes, and nobody has been found since.
        left: where the last one was that said so.
        place: where the leader was that gave that place.
    """

    epoch: int = 0
    leader: str = ""
    node: str = ""
    successors: tuple[Successor, ...] = ()
    round: int = -1
    leaving: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    resigned: bool = False
    left: Endpoint | None = None
    place: Endpoint | None = None

    def placed(self, place: Placed, endpoint: Endpoint) -> None:
        """Its leader, which was there, has given a place."""
        self.place = endpoint
        self.epoch, self.leader, self.node = place.epoch, place.leader, place.leader_node
        self.successors, self.round = place.successors, place.round
        self.leaving = self.gone = frozenset()

    def leaves(self, agents: Iterable[str]) -> None:
        """These have said that they go."""
        self.leaving = self.leaving.union(agents)

    def order(self, seen: Whereabouts) -> Sequence[Successor]:
        """Who may follow it, the first first, if the records say this."""
        return newest_order(self.successors, self.round, seen.successors, seen.round)

    def resigns(self, agent: str, gone: Iterable[str], endpoint: Endpoint) -> None:
        """This leader, which was there, goes; so are these members gone."""
        self.resigned, self.leader, self.left = True, agent, endpoint
        self.gone = self.gone.union(gone)
