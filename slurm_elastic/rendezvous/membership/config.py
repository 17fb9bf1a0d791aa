"""The settings of a leader, which stay the same during its term, and who may follow the last round.

A round can be followed only by a side that holds a majority of those of its members that may still be alive. Two such
sides would have to share a member, and an agent is on one side only.
"""

from __future__ import annotations

import enum
import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import Reason, node_of


class OnTie(enum.Enum):
    """Which side goes on when a cut leaves exactly half of the last round on either."""

    LEADER = "leader"
    """The one that has the leader of that round or, once it is known to be gone, the member of the lowest rank left."""
    NONE = "none"
    """Neither, before the cut is healed or more members are known to be gone."""


@dataclass(frozen=True)
class Base:
    """The last published round, as far as it decides who may follow it.

    Attributes:
        members: its agents, by rank.
        leader: the agent that led it, whether a member or not.
        origin: what its workers started from; see :attr:`~.config.Settings.choose_origin`.
        heartbeat_limit: by which its members stop their workers when it is silent; 0 if that is not on record.
    """

    round: int
    members: tuple[str, ...]
    leader: str
    heartbeat_limit: float = 0.0
    origin: str = ""

    @functools.cached_property
    def node_of(self) -> Mapping[str, str]:
        """The node of each member."""
        return {name: node_of(name) for name in self.members}


def has_quorum(
    base: Base | None,
    present: AbstractSet[str],
    gone: AbstractSet[str],
    own: str,
    on_tie: OnTie = OnTie.LEADER,
    *,
    lingering: AbstractSet[str] = frozenset(),
) -> bool:
    """Return whether these agents may form the round after `base`.

    Members that are known to be gone for good do not count. Of the others more than half have to be here; exactly
    half is enough with the leader of that round on this side or, if it is known to be gone, with the member of the
    lowest rank that is not; unless `on_tie` says that half is never enough. With all members gone any agents may go on,
    once none of them can have workers any more: as long as one of them is here, without workers, theirs take no
    step.

    The rule holds whichever departures each side knows of, as long as `gone` is true. Let T be the members that are
    really not gone; two sides have disjoint parts of T, and each side's rest contains T. If one side has more than half
    of its rest, it has more than half of T, and the other has less than half of T and of its own rest. If both have
    exactly half, both rests are T; the leader is on one side only, or really gone, and then only sides that know it
    look at the lowest rank, which is the same for both. The leader need not be a member: it is one process, which leads
    on one side. Sides that differ in `on_tie` hold to the rule as well, since it only takes a quorum away.

    Args:
        base: the last published round, None if there is none.
        present: agents that are here and have no workers any more.
        gone: agents that have announced their leave and left, or whose process is known to have ended.
        lingering: those of `gone` that may still have workers.
    """
    if base is None:
        return True
    rest = [name for name in base.members if name not in gone]
    here = [name for name in rest if name in present]
    if 2 * len(here) != len(rest):
        return 2 * len(here) > len(rest)
    if not rest:
        return not any(name in lingering for name in base.members)
    if on_tie is OnTie.NONE:
        return False
    decides = base.leader if base.leader not in gone else rest[0]
    return decides in present or decides == own


_FULL_RATE = 512
"""Agents up to which the heartbeat limit is what the options say."""


def adapted_limit(heartbeat_limit: float, agents: int) -> float:
    """Return the heartbeat limit for a number of agents, in seconds.

    It grows as the square root of their number, and so does the leader's cost of heartbeats: with four times as many
    agents the leader asks each half as often.

    Args:
        heartbeat_limit: The limit for up to 512 agents, in seconds.
    """
    return heartbeat_limit * math.sqrt(max(1.0, agents / _FULL_RATE))


def no_origin(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
    """Return no origin; see :attr:`Settings.choose_origin`."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """Choices of a user about rounds. All times are in seconds.

    Attributes:
        join_timeout: Time that a round may lack the least number of nodes before the run fails.
        last_call_timeout: Time that a round which has them waits for nodes of which Slurm tells nothing; and that a
            running round goes on while new agents wait for others that are on their way.
        heartbeat_limit: Silence after which the leader of few agents declares one lost; see `adapted_limit`. The limit
            in force is :attr:`~.state.State.heartbeat_limit`.
        leave_margin: Time before an announced departure at which the leader interrupts workers that still run; see
            :func:`~.planned_stop.seconds_to_stop`.
        min_round_time: Least duration of a round that the leader ends for new nodes.
        on_tie: Whether one half of the last round may go on; see :class:`OnTie`. Of the agents of one run the leader's
            counts.
        valid_nodes: The numbers of nodes that a round may have, ascending; empty for every number.
        segment: Rounds have whole segments of so many nodes of one failure domain; `valid_nodes` are multiples of it.
    """

    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    heartbeat_limit: float = 3.0
    leave_margin: float = 5.0
    min_round_time: float = 0.0
    on_tie: OnTie = OnTie.LEADER
    valid_nodes: tuple[int, ...] | range = ()
    segment: int = 1


@dataclass(frozen=True, slots=True)
class Settings(RoundOptions):
    """The settings of a leader, which stay the same during its term. All times are in seconds.

    Attributes:
        max_restarts: Number of worker failures that may restart the workers, over the whole run.
        expected_nodes: Names of the allocation's nodes; empty where no agent can know them (an array).
        first_reason: Why that round is formed: start, requeued in a later incarnation, node_lost or node_left where
            this leader follows another one.
        first_restarts: Number of worker failures charged before this term.
        first_failure: Fingerprint of the last of them, also of an earlier incarnation; empty for none.
        first_ran: Numbers of nodes that have worked before this term, with seconds; see :attr:`~.state.State.ran`.
        first_unusable: Numbers of nodes that the script could not use before this term.
        base: The last round before this term; None if no agent can still be in it.
        gone: Members of `base` that cannot come back: they left, or their processes have ended.
        silent: Members of `base` for which the first round does not wait, as they have been silent for long.
        claimed: True if the records name this leader as that of the incarnation; else it claims that once a quorum has
            joined.
        reconnect_grace: Time after which an agent whose connection broke, and that has not connected again, is lost.
        settle_time: Time that a worker failure waits for the message of a lost or leaving node that explains it.
        root_wait: The same time for a failure that follows from one which no agent has reported yet, and for one after
            which workers write dumps.
        gather_quiet, gather_limit: The leader ends a running round for new nodes when none has joined for
            `gather_quiet`, at the latest `gather_limit` after the first, unless more have announced their join.
        choose_origin: Returns the origin of a round: what its workers start from. Its arguments are the number of the
            last round, None before the first of the incarnation; the origin of that; the inventories of all agents that
            wait; and True if the last round ended by a worker failure. A pure function. Membership reads neither
            origins nor inventories.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    expected_nodes: tuple[str, ...] = ()
    first_round: int = 0
    first_reason: Reason = Reason.START
    first_restarts: int = 0
    first_failure: str = ""
    first_ran: tuple[tuple[int, float], ...] = ()
    first_unusable: tuple[int, ...] = ()
    agent: str = ""
    base: Base | None = None
    gone: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    claimed: bool = True
    reconnect_grace: float = 0.1
    settle_time: float = 0.1
    root_wait: float = 1.0
    gather_quiet: float = 0.05
    gather_limit: float = 1.0
    choose_origin: Callable[[int | None, str, Sequence[str], bool], str] = no_origin

    def round_size(self, agents: int) -> int:
        """Return how many of the waiting agents a round takes: the largest valid number, 0 if none is valid."""
        size = min(agents, self.max_nodes)
        if self.valid_nodes:
            index = bisect_right(self.valid_nodes, size)
            size = self.valid_nodes[index - 1] if index else 0
        return size if size >= self.min_nodes else 0

    def limit_of(self, agents: int) -> float:
        """Return the heartbeat limit of a round, in seconds, by its number of agents."""
        return adapted_limit(self.heartbeat_limit, max(agents, len(self.expected_nodes), self.min_nodes))
