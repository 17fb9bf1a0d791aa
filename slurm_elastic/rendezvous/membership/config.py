"""The settings of a leader, which stay the same during its term."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.quorum import Base, OnTie
from slurm_elastic.rendezvous.membership.reasons import Reason

_FULL_RATE = 512
"""Agents up to which the heartbeat limit is what the options say."""


def adapted_limit(heartbeat_limit: float, agents: int) -> float:
    """Return the heartbeat limit for a number of agents, in seconds.

    It grows as the square root of their number, and so does the leader's cost of heartbeats: with four times as many
    agents the leader asks each half as often.

    Args:
        heartbeat_limit: The limit for up to 512 agents, in seconds.
        agents: Number of agents.
    """
    return heartbeat_limit * math.sqrt(max(1.0, agents / _FULL_RATE))


def _no_origin(last_round: int | None, before: str, inventories: Sequence[str], failed: bool) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a leader, which stay the same during its term. All times are in seconds.

    Attributes:
        min_nodes, max_nodes: Least and largest number of agents in a round.
        valid_nodes: The numbers between them that a round may have, ascending; empty for every number.
        segment: Rounds have whole segments of so many nodes of one failure domain; `valid_nodes` are multiples of it.
        max_restarts: Number of worker failures that may restart the workers, over the whole run.
        expected_nodes: Names of the allocation's nodes; empty where no agent can know them (an array).
        first_round: Number of the first round of this term.
        first_reason: Why that round is formed: start, requeued in a later incarnation, node_lost or node_left where
            this leader follows another one.
        first_node: Name of the node that caused it; empty if none did.
        first_restarts: Number of worker failures charged before this term.
        first_failure: Fingerprint of the last of them, also of an earlier incarnation; empty for none.
        first_ran: Numbers of nodes that have worked before this term, with seconds; see :attr:`~.state.State.ran`.
        first_unusable: Numbers of nodes that the script could not use before this term.
        agent: Identity of the agent that leads; empty for a leader without an agent.
        base: The last round before this term; None if no agent can still be in it.
        gone: Members of `base` that cannot come back: they left, or their processes have ended.
        silent: Members of `base` for which the first round does not wait, as they have been silent for long.
        on_tie: Whether one half of the last round may go on; see :class:`~.quorum.OnTie`.
        claimed: True if the records name this leader as that of the incarnation; else it claims that once a quorum has
            joined.
        join_timeout: Time that a round may lack `min_nodes` agents before the run fails.
        last_call_timeout: Time that a round which has `min_nodes` agents waits for nodes of which Slurm tells nothing;
            and that a running round goes on while new agents wait for others that are on their way.
        heartbeat_limit: Silence after which the leader of few agents declares one lost; see `adapted_limit`. The limit
            in force is :attr:`~.state.State.heartbeat_limit`.
        reconnect_grace: Time after which an agent whose connection broke, and that has not connected again, is lost.
        settle_time: Time that a worker failure waits for the message of a lost or leaving node that explains it.
        root_wait: The same time for a failure that follows from one which no agent has reported yet, and for one after
            which workers write dumps.
        gather_quiet, gather_limit: The leader ends a running round for new nodes when none has joined for
            `gather_quiet`, at the latest `gather_limit` after the first, unless more have announced their join.
        min_round_time: Least duration of a round that the leader ends for new nodes.
        choose_origin: Returns the origin of a round: what its workers start from. Its arguments are the number of the
            last round, None before the first of the incarnation; the origin of that; the inventories of all agents that
            wait; and True if the last round ended by a worker failure. A pure function. Membership reads neither
            origins nor inventories.
        leave_margin: Time before an announced departure at which the leader interrupts workers that still run; see
            :func:`~.planned_stop.seconds_to_stop`.
    """

    min_nodes: int
    max_nodes: int
    valid_nodes: tuple[int, ...] | range = ()
    segment: int = 1
    max_restarts: int = 0
    expected_nodes: tuple[str, ...] = ()
    first_round: int = 0
    first_reason: Reason = Reason.START
    first_node: str = ""
    first_restarts: int = 0
    first_failure: str = ""
    first_ran: tuple[tuple[int, float], ...] = ()
    first_unusable: tuple[int, ...] = ()
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
        """Return how many of the waiting agents a round takes: the largest valid number, 0 if none is valid."""
        size = min(agents, self.max_nodes)
        if self.valid_nodes:
            index = bisect_right(self.valid_nodes, size)
            size = self.valid_nodes[index - 1] if index else 0
        return size if size >= self.min_nodes else 0

    def limit_of(self, agents: int) -> float:
        """Return the heartbeat limit of a round, in seconds, by its number of agents."""
        return adapted_limit(self.heartbeat_limit, max(agents, len(self.expected_nodes), self.min_nodes))
