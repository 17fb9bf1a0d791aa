"""What happens to a run: agents arrive, nodes die, links break, leaders stall; at explicit times.

A schedule is plain data, so that a failing one can be taken apart and printed. Everything that is not in it, such as
how long each message takes, follows from its seed and from who is concerned, and hardly changes when an action is left
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason
from slurm_elastic.rendezvous.membership.config import Settings


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens. `seconds` is how long it lasts."""

    at: float
    agent: str = "leader"
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrive(Action):
    """An agent starts on a node, and says so; it joins when it has got ready, after `seconds`.

    `cohort` as in AgentInfo: name and size.
    """

    node: str = ""
    position: int = 0
    workers: int = 1
    role: str = "trainer"
    takes_part: bool = True
    cohort: tuple[str, int] = ("", 1)
    domain: str = ""

    def candidate(self) -> AgentInfo:
        whose = (self.agent, self.node, self.position, self.workers, self.role, self.node)
        return AgentInfo(*whose, 20000, 0, *self.cohort, domain=self.domain)


@dataclass(frozen=True, slots=True)
class Die(Action):
    """An agent and its workers end. `how`: killed (its connection breaks), power (silence), ragged or fading (the same,
    but its workers end some milliseconds before itself)."""

    how: str = "killed"


@dataclass(frozen=True, slots=True)
class Hang(Action):
    """An agent's process does nothing for a while and then goes on; its workers run."""


@dataclass(frozen=True, slots=True)
class Leave(Action):
    """An agent learns that it has to go, in so many seconds; 0: nobody knows when. It says so, its workers stop, and it
    says goodbye."""

    reason: LeaveReason = LeaveReason.PREEMPTED


@dataclass(frozen=True, slots=True)
class Fail(Action):
    """A worker fails by itself."""


@dataclass(frozen=True, slots=True)
class Complete(Action):
    """An agent's workers end well; it then waits for the others, or goes at once."""

    goes: bool = False


@dataclass(frozen=True, slots=True)
class Break(Action):
    """An agent's connection breaks; the leader may never notice."""

    noticed: bool = True


@dataclass(frozen=True, slots=True)
class Cut(Action):
    """The network between an agent and the leader carries nothing for a while. `afterwards`: the connection goes on,
    turns out to be broken, or is replaced by a second one. With `collectives`, workers do not survive it."""

    afterwards: str = "goes on"
    collectives: bool = False


@dataclass(frozen=True, slots=True)
class StallLeader(Action):
    """The leader processes nothing for a while (busy, or SIGSTOP), and its timer may fire before it reads on."""

    timer_first: bool = False


@dataclass(frozen=True, slots=True)
class SlowLedger(Action):
    """What the leader publishes in this time is written down, and sent out, only at its end."""


@dataclass(frozen=True, slots=True)
class SlurmSays(Action):
    """Slurm tells the leader which nodes are down: those whose agents have all died, and the one of `agent` if there is
    one, wrongly if that lives."""


@dataclass(frozen=True, slots=True)
class Close(Action):
    """An agent closes the run for everybody."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How messages and agents behave when nothing is wrong.

    Attributes:
        delay: usual one-way time of a message, in seconds, at most.
        late: share of messages that take up to `late_delay`.
        doubled: share of messages that are delivered twice.
        stop: usual time in which workers are stopped; one stop in ten takes up to `long_stop`.
    """

    delay: float = 0.002
    late: float = 0.0
    late_delay: float = 0.5
    doubled: float = 0.0
    stop: float = 0.1
    long_stop: float = 0.1


CALM = Noise()
NORMAL = Noise(delay=0.02, late=0.02, doubled=0.02, stop=0.2, long_stop=1.5)
WILD = Noise(delay=0.1, late=0.2, late_delay=1.0, doubled=0.1, stop=0.5, long_stop=3.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that a simulated run depends on.

    Attributes:
        unusable: numbers of nodes with which the script fails before its first step.
    """

    seed: int
    settings: Settings
    noise: Noise
    actions: tuple[Action, ...]
    unusable: frozenset[int] = frozenset()

    @property
    def quiet_at(self) -> float:
        """From here on nothing goes wrong any more."""
        return max((action.at + action.seconds for action in self.actions), default=0.0)
