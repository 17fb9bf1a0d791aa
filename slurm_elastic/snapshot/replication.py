"""Decides which step becomes safe next: other nodes have copies of all its parts. Pure.

Every agent of a round reports how far its workers and its copies are to one agent, the collector, and gets the answer
of :func:`next_goal`: a step to take, ahead of all workers. Each worker keeps its first snapshot from that step on. If
some were further on already, steps differ, and the collector names another one. When all agents have copied the same
step, it is safe, and its predecessor may be overwritten. Agents agree in the same way on a step for the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_elastic.snapshot.lineage import Copy, Holder, Protection, SnapshotId
from slurm_elastic.text import size_text

_SLOW = 10.0
"""Seconds for a copy after which a person is told."""
_FURTHEST = 1 << 12
"""Steps ahead at most: a step that is not taken for long keeps a slot for nothing."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The step that the agents of a round make safe.

    Attributes:
        take: The first snapshot from this step on is kept and copied; None before all have one, and while one of them
            pauses.
        safe: The newest step of the round that is safe; None if none is.
        ahead: Steps by which `take` is ahead of what is known of workers. It grows when workers were further on than
            that, because their steps are short, and shrinks when they were not.
        disk: The newest step that all agents write to disk; None before the first. It was safe when it was named.
    """

    take: int | None = None
    safe: int | None = None
    ahead: int = 1
    disk: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The state of an agent's snapshots.

    Attributes:
        newest: The newest step that all its workers have copied; None before the first.
        take: The step to take that it knows of.
        kept: The step that its workers keep for that; None if one of them has not come to it.
        differs: True if its workers keep different steps.
        copied: The step of which another node has copies of all its parts; None if of none. Where nothing is copied to
            other nodes, the step that is kept.
        wanted: True if the next step that becomes safe has to be written to disk.
        pauses: True while it leaves the network to the training after a copy.
        domain: Its failure domain, such as ``12_3/s0/s4``.
    """

    node: str
    holder: Holder
    newest: int | None = None
    take: int | None = None
    kept: int | None = None
    differs: bool = False
    copied: int | None = None
    wanted: bool = False
    pauses: bool = False
    domain: str = ""


def next_goal(goal: Goal, reports: Mapping[int, Report], nodes: int, *, replicates: bool = True) -> Goal:
    """Return the goal that follows the present one, by the reports of the agents of a round of `nodes` nodes.

    With `replicates` False nothing is copied to other nodes: a step is only named if one has to be written to disk.
    """
    is_asked = any(report.wanted for report in reports.values())
    # A step that is taken before it can be copied is older than it need be when it becomes safe.
    takes = (replicates or is_asked) and not any(report.pauses for report in reports.values())
    newest = [report.newest for report in reports.values() if report.newest is not None]
    if len(newest) < nodes:
        return goal
    if goal.take is None:
        return replace(goal, take=max(newest) + goal.ahead) if takes else goal
    kept = [report.kept for report in reports.values() if report.take == goal.take and report.kept is not None]
    if len(kept) < nodes:
        return goal
    if len(set(kept)) > 1 or any(report.differs for report in reports.values()):
        ahead = min(2 * goal.ahead, _FURTHEST)
        return replace(goal, take=max(*newest, *kept) + ahead, ahead=ahead)
    if all(report.copied == kept[0] for report in reports.values()):
        ahead = goal.ahead - goal.ahead // 4
        take = max(*newest, kept[0]) + ahead if takes and replicates else None
        return Goal(take, kept[0], ahead, kept[0] if is_asked else goal.disk)
    return goal


def kept_step(protection: Protection, groups: Iterable[Sequence[SnapshotId | None]]) -> tuple[int | None, bool]:
    """Return the step that the workers of a node keep, None if one has not come to it; and whether they differ.

    `protection` is what they know of, `groups` are the committed snapshots of each.
    """
    kept = [protection.kept(snapshots) for snapshots in groups]
    steps = [snapshot.step for snapshot in kept if snapshot is not None]
    if not steps or len(steps) < len(kept):
        return None, False
    return max(steps), len(set(steps)) > 1


def partners(reports: Mapping[int, Report]) -> dict[int, int]:
    """Return, by rank of each agent of a round, the rank of the one that holds its copies; empty if there is one node.

    That one is in another failure domain, at each level of the domains that has two, and on another node where there is
    one domain. Each agent holds the copies of one other agent, so in a domain with more than half of the agents some
    hold those of their own domain.
    """
    agents = len(reports)
    largest = max(Counter(report.node for report in reports.values()).values())
    if largest == agents:
        return {}
    first = {reports[rank].node: rank for rank in sorted(reports, reverse=True)}
    ranks = sorted(reports, key=lambda rank: (reports[rank].domain.split("/"), first[reports[rank].node], rank))
    # Half of the agents away only those of a domain with more than half of them meet their own, at every level.
    distance = agents // 2 if len({report.domain for report in reports.values()}) > 1 else largest
    return dict(zip(ranks, ranks[distance:] + ranks[:distance], strict=True))


def link_problem(node: str, seconds: float, size: int, error: str = "") -> str:
    """Return in one line that copies take long or do not arrive; empty if all is well.

    A copy of `size` bytes to a node has taken `seconds`; with an error, no copy has arrived for as long.
    """
    if seconds < _SLOW:
        return ""
    cost = "fewer snapshots are safe, and a lost node costs the steps since the last of them"
    if error:
        return f"no copy of a snapshot has come to {node} for {seconds:.0f} s ({error}): {cost}"
    return f"a copy of {size_text(size)} to {node} takes {seconds:.0f} s: {cost}"


def newest_of(*snapshots: SnapshotId | None) -> SnapshotId | None:
    """Return the newest of these; None if there is none."""
    return max((snapshot for snapshot in snapshots if snapshot is not None), default=None)


def slot_for_replica(copies: Sequence[Copy | None], safe: SnapshotId | None) -> int:
    """Return the slot for a copy from another node, of two or more: never that of the newest safe snapshot."""
    free = [slot for slot, copy in enumerate(copies) if copy is None or copy.id != safe]
    return min(free, key=lambda slot: SnapshotId(-1, 0) if (copy := copies[slot]) is None else copy.id)
