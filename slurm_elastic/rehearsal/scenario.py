"""The mishaps of a rehearsal: their text, and the plan that they make for a number of nodes. Pure."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurm_elastic.errors import UsageError, did_you_mean


class Kind(enum.Enum):
    """The kinds of mishaps."""

    KILL = "kill"
    """A node is gone without notice: every process on it gets SIGKILL."""
    LEADER = "leader"
    """The same with the node that leads just then."""
    PREEMPT = "preempt"
    """A node gets SIGTERM, and SIGKILL when its grace is over."""
    JOIN = "join"
    """A node joins: one that has gone, else a further one."""
    FAIL = "fail"
    """A worker is killed; its node stays."""
    HANG = "hang"
    """A worker stands still until the watchdog kills it (--hang-timeout); its node stays."""
    PAUSE = "pause"
    """The node of rank 0 stands still until others have taken its place and saved; then its workers are told to stop
    and save, too late. Afterwards it is gone."""
    TIMELIMIT = "timelimit"
    """All nodes get SIGUSR2, and SIGKILL at the time limit; then Slurm starts the job again."""


GRACE, WARNING = 30.0, 120.0
"""Seconds of notice where the scenario names none: the defaults of the agent's --grace and --warning."""

_NOTICE = {Kind.PREEMPT: GRACE, Kind.TIMELIMIT: WARNING}
_NAMES_NODE = frozenset({Kind.KILL, Kind.PREEMPT, Kind.FAIL, Kind.HANG})
_LEAVES = frozenset({Kind.KILL, Kind.PREEMPT, Kind.LEADER, Kind.PAUSE})
_MAJORITY = 3
"""Nodes of which the others are a majority, so that they go on without the leader."""
_SENTENCE = re.compile(
    r"at\s+step\s+(?P<step>\d{1,12})\s+(?P<kind>[a-z]+)(?:\s+node\s+(?P<node>\d{1,4}))?"
    r"(?:\s+with\s+(?P<seconds>\d{1,6}(?:\.\d+)?)\s*s(?:econds)?)?"
)
_EXAMPLE = "write it as in: at step 30 preempt node 2 with 20 s"


@dataclass(frozen=True, slots=True)
class Mishap:
    """One mishap.

    Attributes:
        step: It happens when all workers have completed this step, in the script's own count.
        node: Index of the node, from 0; None where the kind needs none.
        seconds: Notice in seconds; None where there is none.
    """

    kind: Kind
    step: int
    node: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        node = "" if self.node is None else f" node {self.node}"
        notice = "" if self.seconds is None else f" with {self.seconds:g} s"
        return f"at step {self.step} {self.kind.value}{node}{notice}"

    @property
    def announced(self) -> bool:
        """True if no step may be lost: the workers can save before."""
        return self.kind in (Kind.PREEMPT, Kind.JOIN, Kind.TIMELIMIT)


@dataclass(frozen=True, slots=True)
class Plan:
    """The mishaps in the order of their steps, for a number of nodes at the start, and the most at any time."""

    nodes: int
    most: int
    mishaps: tuple[Mishap, ...] = ()

    def seconds(self, kind: Kind, node: int | None = None) -> float | None:
        """Return the notice of the first mishap of a kind, on a node if one is named; None if there is none."""
        return next(
            (mishap.seconds for mishap in self.mishaps if mishap.kind is kind and node in (None, mishap.node)), None
        )


def kill(*, node: int, step: int) -> Mishap:
    """Return the end of a node without notice."""
    return Mishap(Kind.KILL, step, node)


def leader(*, step: int) -> Mishap:
    """Return the end, without notice, of the node that leads."""
    return Mishap(Kind.LEADER, step)


def preempt(*, node: int, step: int, seconds: float = GRACE) -> Mishap:
    """Return the preemption of a node, with a grace in seconds."""
    return Mishap(Kind.PREEMPT, step, node, seconds)


def join(*, step: int) -> Mishap:
    """Return the coming of a node: one that has gone, else a further one."""
    return Mishap(Kind.JOIN, step)


def fail(*, node: int, step: int) -> Mishap:
    """Return the failure of a worker of a node."""
    return Mishap(Kind.FAIL, step, node)


def hang(*, node: int, step: int) -> Mishap:
    """Return the hang of a worker of a node."""
    return Mishap(Kind.HANG, step, node)


def pause(*, step: int) -> Mishap:
    """Return the pause of the node of rank 0, which wakes when others have taken its place."""
    return Mishap(Kind.PAUSE, step)


def timelimit(*, step: int, seconds: float = WARNING) -> Mishap:
    """Return the end of the job at its time limit, with a warning in seconds, and its next start."""
    return Mishap(Kind.TIMELIMIT, step, None, seconds)


def node_name(index: int) -> str:
    """Return the name of a node of a rehearsal."""
    return f"node{index}"


def parse_scenario(text: str) -> tuple[Mishap, ...]:
    """Return the mishaps of a scenario; raises UsageError if a sentence is not understood, or there is none."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    sentences = [part.strip() for line in lines for part in line.split(";") if part.strip()]
    if not sentences:
        raise UsageError(f"the scenario has no mishap; {_EXAMPLE}")
    return tuple(_mishap(sentence) for sentence in sentences)


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Return the kinds in a list such as ``kill,preempt``; raises UsageError for a word that is none."""
    return tuple(_kind(word.strip()) for word in text.split(","))


def spread(kinds: Sequence[Kind], nodes: int, steps: int) -> tuple[Mishap, ...]:
    """Return one mishap of each kind, at equal distances over the steps of a training."""
    present, mishaps = set(range(nodes)), []
    for index, kind in enumerate(kinds, 1):
        step = steps * index // (len(kinds) + 1)
        # Not the first node, which leads at first: that is a kind of its own.
        node = max(present, default=0) if kind in _NAMES_NODE else None
        mishaps.append(Mishap(kind, step, node, _NOTICE.get(kind)))
        present = _after(present, mishaps[-1])
    return tuple(mishaps)


def plan(mishaps: Sequence[Mishap], nodes: int) -> Plan:
    """Return the plan of mishaps for a number of nodes; raises UsageError for a scenario that cannot be."""
    ordered = tuple(sorted(mishaps, key=lambda mishap: mishap.step))
    for before, after in itertools.pairwise(ordered):
        if before.step == after.step:
            raise UsageError(f"two mishaps at step {after.step}; give each a step of its own")
    present, most = set(range(nodes)), nodes
    for mishap in ordered:
        _require_possible(mishap, present, nodes)
        present = _after(present, mishap)
        most = max(most, len(present))
    return Plan(nodes, most, ordered)


def _mishap(sentence: str) -> Mishap:
    match = _SENTENCE.fullmatch(" ".join(sentence.lower().replace("time limit", "timelimit").split()))
    if match is None:
        raise UsageError(f"the scenario says {sentence!r}, which is not understood; {_EXAMPLE}")
    kind = _kind(match["kind"])
    if (match["node"] is not None) != (kind in _NAMES_NODE) or (match["seconds"] and kind not in _NOTICE):
        example = Mishap(kind, 30, 2 if kind in _NAMES_NODE else None, 20.0 if kind in _NOTICE else None)
        raise UsageError(f"the scenario says {sentence!r}, which is not understood; write it as in: {example}")
    node = None if match["node"] is None else int(match["node"])
    seconds = _NOTICE.get(kind) if match["seconds"] is None else float(match["seconds"])
    return Mishap(kind, int(match["step"]), node, seconds)


def _kind(word: str) -> Kind:
    try:
        return Kind(word)
    except ValueError:
        names = [kind.value for kind in Kind]
        fix = did_you_mean(word, names, otherwise=f"there are {', '.join(names)}")
        raise UsageError(f"no mishap {word!r}; {fix}") from None


def _require_possible(mishap: Mishap, present: set[int], nodes: int) -> None:
    if mishap.step < 1:
        raise UsageError(f"'{mishap}': a mishap comes after a step was completed; give step 1 or more")
    if mishap.node is not None and mishap.node not in present:
        there = ", ".join(map(str, sorted(present)))
        raise UsageError(f"'{mishap}': that node is not there; nodes are counted from 0, and there are {there} then")
    if mishap.kind is Kind.PAUSE and len(present) < _MAJORITY:
        raise UsageError(
            f"'{mishap}': two of three nodes have to go on without the one that is paused, and there are "
            f"{len(present)}; give --nodes {nodes + _MAJORITY - len(present)} or more"
        )
    if mishap.kind in _LEAVES and len(present) == 1:
        raise UsageError(f"'{mishap}' takes the last node; give --nodes {nodes + 1} or more, or let one join before")


def _after(present: set[int], mishap: Mishap) -> set[int]:
    """Return the nodes that are there after a mishap; the leader and rank 0 are taken to be on the first of them."""
    if mishap.kind is Kind.JOIN:
        return present | {first_free(present)}
    if mishap.kind in (Kind.LEADER, Kind.PAUSE):
        return present - {min(present, default=0)}
    return present - {mishap.node} if mishap.kind in _LEAVES and mishap.node is not None else present


def first_free(present: Collection[int]) -> int:
    """Return the index of the node that joins these."""
    return next(index for index in range(len(present) + 1) if index not in present)
