"""The settings of a leader, which stay the same during its term."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.quorum import Base, OnTie
from slurm_elastic.rendezvous.membership.reasons import Reason

__all__ = ["Settings", "adapted_limit"]


_FULL_RATE = 512
"""Agents up to which the heartbeat limit is what the options say."""


def adapted_limit(heartbeat_limit: float, agents: int) -> float:
    """Return the heartbeat limit for so many agents, given the one for few.

    It grows as the square root of their number, and so does what signs of life cost the leader: with four times as many
    agents each is asked half as often.
    """
    return heartbeat_limit * math.sqrt(max(1.0, agents / _FULL_RATE))


def _no_origin(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a leader, which stay the same during its term. Times in seconds.

    Attributes:
        min_nodes, max_nodes: bounds of a round's size, in agents.
        valid_nodes: the sizes between them that a round may have, ascending; empty for every size.
        max_restarts: how many times worker failures may restart the group, over the whole run.
        expected_nodes: the nodes of the allocation; empty when they cannot be known (an array).
        first_round: number of the first round of this term.
        first_reason: start, or requeued for a later incarnation; node_lost or node_left when a leader is followed.
        first_node: the node that caused the first round of this term, if one did.
        first_restarts: worker failures charged before this term.
        first_failure: fingerprint of the last one that was charged before this term, also to an earlier incarnation;
            empty for none.
        agent: the agent that leads; empty for a leader without one.
        base: the last round before this term; None if there is none that anybody could still be in.
        gone: members of `base` that are known to be gone for good.
        silent: members of `base` that have been silent for long, and are not waited for.
        on_tie: what half of the last round is worth; see :class:`~.quorum.OnTie`.
        claimed: whether the epoch is the leader's own; else it is claimed once there is a quorum.
        join_timeout: how long a round may lack its minimum before the run is given up.
        last_call_timeout: how long to wait for nodes whose fate is unknown once the minimum is there, and how long new
            agents wait for others that are on their way, before a running round is ended for them.
        heartbeat_limit: silence after which an agent is lost, of few agents; see `adapted_limit`. The one in force is
            :attr:`~.state.State.heartbeat_limit`.
        reconnect_grace: how long a broken connection may stay broken before the agent is lost.
        settle_time: how long a worker failure waits for news of a lost or leaving node that explains it.
        root_wait: the same for a worker failure that is the consequence of another one, of which no agent has told yet.
        gather_quiet, gather_limit: a running round is interrupted for new nodes when none has come for `gather_quiet`,
            at the latest `gather_limit` after the first, unless more are known to be on their way.
        min_round_time: a round is not ended for new nodes before it has lasted so long.
        choose_origin: returns the origin of a round: what its workers start from. Its arguments are the number of the
            last round, None before the first of the incarnation; the origin of that; the inventories of all agents that
            wait; and whether the last round ended by a worker failure. Pure. Membership reads neither origins nor
            inventories.
        leave_margin: how long before an announced departure those that still run are interrupted; see
            :func:`~.planned_stop.seconds_to_stop`.
    """

    min_nodes: int
    max_nodes: int
    valid_nodes: tuple[int, ...] | range = ()
    max_restarts: int = 0
    expected_nodes: tuple[str, ...] = ()
    first_round: int = 0
    first_reason: Reason = Reason.START
    first_node: str = ""
    first_restarts: int = 0
    first_failure: str = ""
    agent: str = ""
    base: Base | None = None
    gone: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    on_tie: OnTie = OnTie.LEADER
    claimed: bool = True
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    heartbeat_limit: float = 3.0
    reconnect_grace: float = 0.1
    settle_time: float = 0.1
    root_wait: float = 1.0
    gather_quiet: float = 0.05
    gather_limit: float = 1.0
    min_round_time: float = 0.0
    leave_margin: float = 5.0
    choose_origin: Callable[[int | None, str, Sequence[str], bool], str] = _no_origin

    def round_size(self, agents: int) -> int:
        """Return how many of so many agents a round takes: the largest valid number, 0 if none is valid."""
        size = min(agents, self.max_nodes)
        if self.valid_nodes:
            index = bisect_right(self.valid_nodes, size)
            size = self.valid_nodes[index - 1] if index else 0
        return size if size >= self.min_nodes else 0

    def limit_of(self, agents: int) -> float:
        """Return the heartbeat limit of a round of so many agents."""
        return adapted_limit(self.heartbeat_limit, max(agents, len(self.expected_nodes), self.min_nodes))
