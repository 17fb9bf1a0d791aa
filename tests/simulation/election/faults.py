"""What happens to a run with several possible leaders: drawn from a seed, or one thing at one message.

A random schedule has up to nine faults at any times. A struck one is a short script, in which one thing more happens
just before a message arrives, or just before or after something is done with the records, to the agent that leads
there. Played for every message and every kind, such a script leaves out no moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

LEADER = -1
"""Stands for the agent that leads when a fault happens."""

STRIKES = ("kill", "power", "pause", "leave", "cut", "break", "lose")


@dataclass(frozen=True)
class Fault:
    """One thing that happens: kill, power, pause, leave, arrive, cut, break, disk, fail, which a worker does, or lose:
    what a leader asks the records next is not answered, whether it was done or not.

    Attributes:
        at: virtual time in seconds.
        kind: what.
        agent: index of whom; of a cut and a slow disk nobody.
        seconds: how long it lasts, or matters; of a leave, how long workers run on if nobody stops them.
        side: indexes of the agents on one side of a cut.
        message: instead of a time, the number of the message before which it happens; to the one that leads there.
    """

    at: float
    kind: str
    agent: int = 0
    seconds: float = 0.0
    side: tuple[int, ...] = ()
    message: int = 0

    def __str__(self) -> str:
        when = f"before message {self.message}" if self.message else f"at {self.at:.3f} s"
        whom = f" {self.side}" if self.kind == "cut" else f" of {'the leader' if self.agent == LEADER else self.agent}"
        return f"{self.kind}{whom} {when}{f', {self.seconds:.3f} s' if self.seconds else ''}"


@dataclass(frozen=True)
class Script:
    """One schedule.

    Attributes:
        seed: of all that is drawn on the way.
        agents: how many there are.
        faults: what happens to them.
        store: whether the first agent leads without ever having workers.
        late: by index, when an agent comes that is not there from the beginning.
        unusable: numbers of nodes with which the script fails before its first step.
    """

    seed: int
    agents: int
    faults: tuple[Fault, ...]
    store: bool = False
    late: tuple[tuple[int, float], ...] = ()
    unusable: frozenset[int] = frozenset()


_KINDS = {"kill": 5, "power": 2, "pause": 3, "leave": 4, "arrive": 4, "cut": 4, "break": 2, "disk": 1}


def draw(seed: int) -> Script:
    """A random schedule; the same seed gives the same one."""
    rng = random.Random(seed)
    agents = rng.choice((2, 3, 3, 4, 4, 5, 6))
    faults = []
    at = 2.0
    for _ in range(rng.choice((1, 2, 3, 4, 6, 9))):
        # Half of what goes wrong does so while something else is being dealt with.
        at += rng.expovariate(8.0) if rng.random() < 0.5 else rng.uniform(0.0, 6.0)
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        faults.append(_fault(rng, at, kind, rng.choice((LEADER, rng.randrange(agents))), agents))
    return Script(seed, agents, tuple(faults), store=rng.random() < 0.2, late=_late(rng, agents, 5.0))


def script(seed: int) -> Script:
    """A short schedule of few agents with at most two faults."""
    rng = random.Random(f"{seed} script")
    agents = rng.choice((2, 3, 3, 4))
    if rng.random() < 0.2:
        # Something happens to one that trains alone when others have just come.
        store = rng.random() < 0.5
        agents = max(agents, 3) if store else agents
        fault = _fault(rng, rng.uniform(1.1, 1.5), rng.choice(("leave", "leave", "break", "kill")), int(store), agents)
        return Script(seed, agents, (fault,), store, tuple((index, 1.1) for index in range(1 + store, agents)))
    faults = []
    at = 1.0
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        at += rng.choice((0.0, rng.uniform(0.0, 1.0), rng.uniform(0.0, 5.0)))
        kind = rng.choice(("kill", "power", "pause", "leave", "leave", "cut", "arrive", "break"))
        faults.append(_fault(rng, at, kind, rng.choice((LEADER, LEADER, rng.randrange(agents))), agents))
    return Script(seed, agents, tuple(faults), store=rng.random() < 0.2, late=_late(rng, agents, 1.5))


def failing(seed: int) -> Script:
    """A short schedule in which a worker fails by itself, or two."""
    rng = random.Random(f"{seed} failing")
    agents = rng.choice((2, 3, 3, 4))
    moments = [rng.uniform(1.0, 1.5) for _ in range(rng.choice((1, 1, 2)))]
    # It takes a while until somebody is charged.
    faults = tuple(Fault(moment, "fail", rng.randrange(agents), seconds=2.0) for moment in sorted(moments))
    return Script(seed, agents, faults, store=rng.random() < 0.2)


def sizes(seed: int) -> Script:
    """A short schedule of nodes that come and go, with a script that cannot use all numbers of nodes.

    It can use the number that begins; the leader goes, or something else happens to it, when others have come or gone.
    """
    rng = random.Random(f"{seed} sizes")
    agents = rng.choice((2, 3, 3, 4))
    first = rng.randint(1, agents)
    unusable = frozenset(size for size in range(1, agents + 1) if size != first and rng.random() < 0.7)
    late = tuple((index, rng.uniform(2.5, 3.5)) for index in range(first, agents))
    faults, at = [], 2.5
    for _ in range(rng.choice((1, 2, 2, 3))):
        at += rng.choice((rng.uniform(0.0, 0.6), rng.uniform(0.0, 5.0)))
        kind = rng.choice(("kill", "kill", "power", "leave", "pause", "arrive", "break"))
        faults.append(_fault(rng, at, kind, rng.choice((LEADER, LEADER, rng.randrange(agents))), agents))
    return Script(seed, agents, tuple(faults), late=late, unusable=unusable)


def strike(base: Script, message: int, kind: str) -> Script:
    """The same schedule with one fault more, before a message."""
    rng = random.Random(f"{base.seed} {message} {kind}")
    fault = replace(_fault(rng, 0.0, kind, LEADER, base.agents), message=message)
    return replace(base, faults=(*base.faults, fault))


def _late(rng: random.Random, agents: int, until: float) -> tuple[tuple[int, float], ...]:
    if rng.random() < 0.7:
        return ()
    return tuple((index, rng.uniform(0.2, until)) for index in range(rng.randint(1, agents - 1), agents))


def _fault(rng: random.Random, at: float, kind: str, agent: int, agents: int) -> Fault:
    seconds = rng.choice((rng.uniform(0.05, 2.0), rng.uniform(2.0, 9.0)))
    side = tuple(sorted(rng.sample(range(agents), rng.randint(1, agents - 1))))
    lasts = kind in ("pause", "cut", "disk", "leave")
    return Fault(at, kind, agent, seconds if lasts else 0.0, side if kind == "cut" else ())
