"""The agents of a run: their identities and data, the leader's knowledge of them, the reasons of rounds and leaves."""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_IDENTITY = re.compile(r"([^/]+)/([0-9]+)\.([0-9]+)/([0-9]+)")


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """An agent, unique over a run.

    Attributes:
        job: the job that it runs in; 0 outside Slurm.
        restarts: how many times Slurm had requeued that job when the agent started.
    """

    node: str
    job: str
    restarts: int
    process: int

    def __str__(self) -> str:
        """As messages and records have it."""
        return f"{self.node}/{self.job}.{self.restarts}/{self.process}"

    @classmethod
    def parse(cls, agent: str) -> AgentIdentity | None:
        """Return the identity that a text stands for, None if it is not of this form."""
        parts = _IDENTITY.fullmatch(agent)
        return None if parts is None else cls(parts[1], parts[2], int(parts[3]), int(parts[4]))


def node_of(agent: str) -> str:
    """Return the node in an agent's identity; the whole text if it is of another form."""
    return agent.partition("/")[0]


def job_of(agent: str) -> str:
    """Return the job in an agent's identity, ``<job id>.<restart count>``; empty if it has none."""
    parts = AgentIdentity.parse(agent)
    return "" if parts is None else f"{parts.job}.{parts.restarts}"


class Reason(enum.Enum):
    """The reason of a round; workers see it as SLURM_ELASTIC_REASON."""

    START = "start"
    NODE_JOINED = "node_joined"
    NODE_LEFT = "node_left"
    NODE_LOST = "node_lost"
    WORKER_FAILED = "worker_failed"
    REQUEUED = "requeued"


class LeaveReason(enum.Enum):
    """The reason of an announced leave."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    DRAINED = "drained"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    NODE_LEFT = "node_left"
    """The cause is not known yet."""
    FINISHED = "finished"
    FAILED = "failed"


STEPPED = 1e9
"""The seconds that workers count as having run once they have taken a step for certain."""
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """The data that an agent sends when it joins.

    Attributes:
        agent: identity, unique over the run: node, job id, restart count and pid.
        position: index of the node in Slurm's node list; agents are ranked by it first. Agents of an array, whose
            list has one node each, all say 0 and are ranked by the natural order of their node names.
        local_world_size: number of workers that it will start, at least 1.
        store_port: port that is bound already, on which the workers' store listens if this agent becomes rank 0.
        standby_port: port on which this agent listens, and on which it leads if it has to; 0 if it never does.
        cohort: name of the srun that started this agent together with others; empty if none did.
        cohort_size: how many agents that was to start, this one included.
        releases: of Python and torch, such as ``Python 3.11, torch 2.15.0``; empty if it does not say.
        inventory: what its memory holds for the workers of the next round, as text that membership does not read; empty
            for nothing. Final: it has no workers that could change it.
        ran: seconds that its workers of the last round ran, see `STEPPED`; 0 if it is known that they took no step.
        proven: its workers of any round have taken a step for certain, whoever led then.
        domain: its failure domain, the parts from the outermost on between slashes; empty if none is known. Agents of a
            domain have ranks beside each other, and domains the natural order of their labels, so it never changes.
    """

    agent: str
    node: str
    position: int
    local_world_size: int
    role: str
    address: str
    store_port: int
    standby_port: int = 0
    cohort: str = ""
    cohort_size: int = 1
    releases: str = ""
    inventory: str = ""
    ran: float = 0.0
    proven: bool = False
    domain: str = ""

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key of ranks: domain, none last, Slurm's order, then node names with numbers by value (n2, n10)."""
        return (not self.domain, _natural(self.domain), self.position, _natural(self.node), self.agent)


@functools.lru_cache(maxsize=1 << 15)
def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return the sort key of a name. Kept: each round sorts all nodes of the run, mostly the same ones."""
    return tuple((0, int(part), part) if part.isdigit() else (1, 0, part) for part in _DIGITS.split(name))


@dataclass(frozen=True)
class WorkerFailure:
    """The first worker of an agent that failed while the agent was not stopping it; a run's root cause is one of these.

    Attributes:
        exit_code: Its exit code, minus the number of the signal that ended it.
        error: The line of these that names the error; empty for the last one.
        error_file, log: Paths of the error file and of the log; empty for none.
        hung: True if the watchdog killed it because it made no progress.
        timed_out: True if it ended because a collective took too long.
        uncharged: True if its agent starts workers in another way from now on, so that the failure costs no restart.
        cause, domain, outlook, detail: The cause as :mod:`slurm_elastic.failures` finds it; membership does not read
            these. Empty if it is unknown.
        consequence: True if its end tells that another worker, or an agent, made it fail.
        where: The progress of the worker as text; empty if that is unknown.
        fingerprint: Equal for two failures that are the same; empty if failures of this kind cannot be compared.
        stragglers: Rank and node of each worker that the others waited for, as the leader has found.
        ran: Seconds that the worker had run, see `STEPPED`.
    """

    agent: str
    node: str
    rank: int
    exit_code: int
    message: str = ""
    error_file: str = ""
    log: str = ""
    hung: bool = False
    timed_out: bool = False
    uncharged: bool = False
    cause: str = ""
    domain: str = ""
    outlook: str = ""
    detail: str = ""
    consequence: bool = False
    where: str = ""
    fingerprint: str = ""
    stragglers: tuple[tuple[int, str], ...] = ()
    ran: float = STEPPED
    script: str = ""
    error: str = ""

    @property
    def stalled(self) -> bool:
        """True if it was the end of a wait, so that another worker may be the one that did not go on."""
        return self.hung or self.timed_out

    @property
    def summary(self) -> str:
        """One line: that which names the error, else the last of the message."""
        return self.error or self.message.split("\n")[-1] or f"exit code {self.exit_code}"


def root_of(failures: Iterable[WorkerFailure]) -> WorkerFailure:
    """Return the failure that has caused the others, given in the order in which they became known.

    A worker whose end by the watchdog, or before its first step, is explained makes others fail, whichever became known
    first. So does every worker that does not say itself that it is a consequence.
    """
    return min(failures, key=lambda failure: (not failure.uncharged, not failure.hung, failure.consequence))


class Status(enum.Enum):
    """The state of an agent, as far as the leader knows."""

    WAITING = "waiting"
    """Has joined, has no workers, waits for a place; also a member of a round that winds down that has stopped."""
    RUNNING = "running"
    """Member of the current round; may have announced that it leaves."""
    FINISHED = "finished"
    """Member of the current round; its workers have ended well. It keeps its place, even when it leaves or is lost."""
    STOPPING = "stopping"
    """Was interrupted, or is to go; may still have workers of the round that ended."""


@dataclass(frozen=True)
class Agent:
    """One agent that the leader knows to be alive, or has not yet given up.

    Attributes:
        candidate: its data in its newest join.
        attempt: number of that join; an agent counts its joins from 1.
        last_message_at: leader's monotonic time of the last sign of life.
        round: the last round it had a place in, None before the first.
        leave_reason: set from the announcement on.
        leave_deadline: when its workers have to stop, in leader's monotonic time, by its newest announcement.
        departed: it finished its part of the round and went, or was lost afterwards; it counts for this round only.
        cut_off: it has stopped its workers of this round because it did not hear the leader, and has joined again.
        proven: its workers have run in a round that worked; see :func:`.transitions.learn`.
    """

    candidate: AgentInfo
    attempt: int
    status: Status
    last_message_at: float
    round: int | None = None
    leave_reason: LeaveReason | None = None
    leave_deadline: float = math.inf
    departed: bool = False
    cut_off: bool = False
    proven: bool = False
