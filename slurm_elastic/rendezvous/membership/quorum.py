"""Decides who may follow the last round: enough of its members, so that no two sides of a cut network both do.

A round can be followed only by a side that holds a majority of those of its members that may still be alive. Two such
sides would have to share a member, and an agent is on one side only.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


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
        round: its number.
        members: its agents, by rank.
        nodes: the nodes of `members`, in the same order.
        leader: the agent that led it, whether a member or not.
        origin: what its workers started from; see :attr:`~.config.Settings.choose_origin`.
        heartbeat_limit: by which its members stop their workers when it is silent; 0 if that is not on record.
    """

    round: int
    members: tuple[str, ...]
    nodes: tuple[str, ...]
    leader: str
    heartbeat_limit: float = 0.0
    origin: str = ""

    @functools.cached_property
    def node_of(self) -> Mapping[str, str]:
        """The node of each member."""
        return dict(zip(self.members, self.nodes, strict=True))


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
        own: the agent that leads this side, a member or not.
        on_tie: what exactly half of the others is worth.
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


def unaccounted(base: Base | None, present: AbstractSet[str], gone: AbstractSet[str]) -> tuple[str, ...]:
    """The members of the last round of which it is not known where they are."""
    return () if base is None else tuple(name for name in base.members if name not in present and name not in gone)
