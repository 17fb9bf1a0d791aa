"""The ranks of a run that stay slow, and the scores of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurm_elastic.observe.records import Event
from slurm_elastic.slow_ranks import scores

if TYPE_CHECKING:
    # It imports msgspec.
    from slurm_elastic.observe.live import LiveAgent


@dataclass(frozen=True, slots=True)
class SlowRankView:
    """A rank that stays slow, or was slow in a round, by the events of the run.

    Attributes:
        rank, node: Its rank and its node.
        since: When it was named, in seconds since 1970.
        until: When it was slow no more; None if it was slow until the round ended, or is now.
        relative_score: As it was named, see :class:`slurm_elastic.slow_ranks.Score`.
        text: The line of the event.
    """

    rank: int
    node: str
    since: float
    until: float | None
    relative_score: float | None
    text: str


@dataclass(frozen=True, slots=True)
class RankScore:
    """The scores of a rank now, see :class:`slurm_elastic.slow_ranks.Score`; seconds are per step."""

    rank: int
    node: str
    relative_score: float | None
    individual_score: float
    busy_seconds: float
    loading_seconds: float
    waiting_seconds: float


def slow_by_round(events: Sequence[Event]) -> dict[int, tuple[SlowRankView, ...]]:
    """Return the ranks that were slow in each round, in the order in which they were named."""
    by_round: dict[int, list[SlowRankView]] = {}
    for event in events:
        rank, round_ = event.whole("rank"), event.round
        if event.kind not in ("rank_slow", "rank_fast") or rank is None or round_ is None:
            continue
        of_round = by_round.setdefault(round_, [])
        if event.kind == "rank_slow":
            node = next(iter(event.nodes), "")
            of_round.append(SlowRankView(rank, node, event.time, None, event.number("relative_score"), event.text))
        else:
            for index, view in enumerate(of_round):
                if view.rank == rank and view.until is None:
                    of_round[index] = replace(view, until=event.time)
    return {round_: tuple(views) for round_, views in by_round.items()}


def slow_ranks(events: Sequence[Event], round_: int | None) -> tuple[SlowRankView, ...]:
    """Return the ranks of a round that stay slow."""
    views = slow_by_round(events).get(round_, ()) if round_ is not None else ()
    return tuple(view for view in views if view.until is None)


def rank_scores(agents: Mapping[str, LiveAgent], round_: int | None) -> tuple[RankScore, ...]:
    """Return the scores of all ranks of a round whose pace is known, in the order of ranks.

    Args:
        agents: The reports of agents by their identities.
        round_: The round.
    """
    paces = {
        worker.rank: (name.partition("/")[0], pace)
        for name, agent in agents.items()
        if agent.round == round_ and agent.state == "training"
        for worker in agent.workers
        if (pace := worker.pace) is not None
    }
    by_rank = scores({rank: pace for rank, (_, pace) in paces.items()})
    return tuple(
        RankScore(
            rank,
            node,
            None if by_rank[rank].relative is None else round(by_rank[rank].relative or 0.0, 3),
            round(by_rank[rank].individual, 3),
            pace.busy,
            pace.loading,
            pace.waiting,
        )
        for rank, (node, pace) in sorted(paces.items())
    )
