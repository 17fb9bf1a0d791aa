"""Which worker the others wait for, when one hangs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Slowest", "who_is_behind"]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Slowest:
    """The worker of a node that has taken the fewest steps of the round.

    Attributes:
        rank: of it.
        steps: so many.
    """

    rank: int
    steps: int


def who_is_behind(slowest: Sequence[Slowest]) -> str:
    """Say which ranks have taken fewer steps than others; empty if fewer than two nodes tell.

    A worker that never comes to a collective holds up all others in it, and their watchdogs expire like its own: the
    one that is behind is the one to look at.
    """
    if len(slowest) < 2:
        return ""
    least, most = min(one.steps for one in slowest), max(one.steps for one in slowest)
    if least == most:
        return f"no node is behind: {least} steps in this round everywhere"
    ranks = sorted(one.rank for one in slowest if one.steps == least)
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    some, are = ("ranks", "are") if len(ranks) > 1 else ("rank", "is")
    return f"{some} {shown} {are} behind: {least} steps in this round, others {most}"
