"""The pace of ranks, their scores, and when one is named as slow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from slurm_elastic.slow_ranks import LOOKS, Meter, Pace, Reading, Score, SlowRanks, read, scores, step

LONG = range(3 * LOOKS)


def pace(busy: float, whole: float = 1.0, *, number: int = 1, best: float | None = None) -> Pace:
    return Pace(whole, busy, 0.0, whole - busy, busy if best is None else best, number)


def look(busy: Sequence[float], number: int, whole: float | None = None) -> dict[int, Pace]:
    slowest = max(busy)
    return {rank: pace(each, slowest if whole is None else whole, number=number) for rank, each in enumerate(busy)}


def named_after(looks: Sequence[Sequence[float]]) -> list[tuple[int, bool]]:
    state, found = SlowRanks(), []
    for number, busy in enumerate(looks):
        state, changed = step(state, look(busy, number))
        found += [(each.rank, each.over) for each in changed]
    return found


def test_a_pace_is_measured_over_a_window() -> None:
    meter = read(Meter(), Reading(10, 100.0, 5.0, 1.0, 0.0))
    assert meter.pace is None
    assert read(meter, Reading(20, 105.0, 8.0, 1.0, 0.0)) == meter, "not long enough"
    assert read(meter, Reading(14, 115.0, 8.0, 1.0, 0.0)) == meter, "not enough steps"
    meter = read(meter, Reading(30, 110.0, 9.0, 2.0, 1.0))
    assert meter.pace == Pace(0.5, pytest.approx(0.25), pytest.approx(0.05), pytest.approx(0.2), pytest.approx(0.25))
    meter = read(meter, Reading(40, 120.0, 10.0, 2.0, 1.0))
    assert meter.pace == Pace(1.0, pytest.approx(0.9), 0.0, pytest.approx(0.1), pytest.approx(0.25), 2)


def test_a_new_worker_is_measured_anew() -> None:
    meter = Meter(Reading(10, 100.0, 5.0, 1.0, 0.0), pace(0.5))
    assert read(meter, Reading(1, 101.0, 0.0, 0.0, 0.0)) == Meter(Reading(1, 101.0, 0.0, 0.0, 0.0))


def test_checkpoints_of_one_rank_do_not_make_it_slow() -> None:
    meter = read(Meter(Reading(0, 0.0, 0.0, 0.0, 0.0)), Reading(10, 10.0, 0.0, 0.0, 6.0))
    assert meter.pace is not None
    assert meter.pace.busy == pytest.approx(0.4)


def test_scores_are_relative_to_the_others_and_to_the_own_best() -> None:
    found = scores({0: pace(1.0), 1: pace(2.0, best=1.5), 2: pace(1.2), 3: pace(0.9)})
    assert found[1] == Score(0.5, 0.75, 1.0)
    assert found[3] == Score(1.0, 1.0, 1.2)
    assert found[0].relative == 1.0
    assert scores({0: pace(1.0)}) == {0: Score(None, 1.0, None)}
    assert scores({0: pace(1.0), 1: pace(4.0)})[1].relative == 0.25
    assert scores({}) == {}
    assert scores({0: pace(0.0), 1: pace(0.0)})[0] == Score(1.0, 1.0, 0.0)


def test_the_median_of_the_others_is_right() -> None:
    drawn = random.Random(7)
    for _ in range(200):
        busy = [drawn.choice((0.1, 0.2, drawn.random())) for _ in range(drawn.randrange(2, 9))]
        for rank, score in scores(look(busy, 1)).items():
            others = sorted(busy[:rank] + busy[rank + 1 :])
            middle = len(others) // 2
            assert score.others == pytest.approx((others[middle] + others[(len(others) - 1) // 2]) / 2)


def test_a_rank_that_stays_slow_is_named_once_and_when_it_is_over() -> None:
    slow, even = [0.2, 0.2, 0.5, 0.2], [0.2, 0.2, 0.2, 0.2]
    assert named_after([slow] * LOOKS) == [(2, False)]
    assert named_after([slow] * 3 * LOOKS) == [(2, False)]
    assert named_after([slow] * (LOOKS - 1) + [even] + [slow] * (LOOKS - 1)) == [], "not in a row"
    assert named_after([slow] * LOOKS + [even] * LOOKS) == [(2, False), (2, True)]
    assert named_after([slow] * LOOKS + [even] * (LOOKS - 1) + [slow] * 3) == [(2, False)]


def test_a_rank_between_the_bounds_keeps_what_it_is() -> None:
    between = [0.2, 0.2, 0.25]
    assert named_after([between] * 3 * LOOKS) == []
    assert named_after([[0.2, 0.2, 0.4]] * LOOKS + [between] * 3 * LOOKS) == [(2, False)]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([look([0.01, 0.01, 0.04], number, 1.0) for number in LONG], id="nearly all is communication"),
        pytest.param([look([0.2, 0.2, 0.5], 1) for _ in LONG], id="a pace that was seen counts once"),
        pytest.param([look([0.2, 0.2], number) for number in LONG] + [{}], id="nothing is known of the slow rank"),
    ],
)
def test_what_is_not_worth_a_word(looks: list[dict[int, Pace]]) -> None:
    state = SlowRanks()
    for paces in looks:
        state, changed = step(state, paces)
        assert changed == ()


def noisy(drawn: random.Random, ranks: int, spread: float, slow: float = 1.0) -> list[float]:
    """Return the busy time of ranks: the same work, and what a loaded machine makes of it, the last one slow."""
    busy = [0.2 * max(0.3, drawn.gauss(1.0, spread)) * (1 + (drawn.random() < 0.05)) for _ in range(ranks)]
    return [*busy[:-1], busy[-1] * slow]


@pytest.mark.parametrize("ranks", [2, 4, 16, 256])
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_of_an_even_run_is_named(seed: int, ranks: int) -> None:
    drawn = random.Random(seed)
    # An hour, with a standard deviation of 10 %, and a rank in twenty that takes twice the time in one look.
    assert named_after([noisy(drawn, ranks, 0.1) for _ in range(360)]) == []


@pytest.mark.parametrize("ranks", [2, 4, 16, 256])
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_named_and_no_other(seed: int, ranks: int) -> None:
    drawn = random.Random(seed)
    found = named_after([noisy(drawn, ranks, 0.1, slow=2.0) for _ in range(60)])
    assert found[0] == (ranks - 1, False)
    assert {rank for rank, _ in found} == {ranks - 1}
