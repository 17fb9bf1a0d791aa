"""The value on which ranks differ is named; ranks wait for nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import tensor
from torch.distributed import HashStore

from slurm_elastic.snapshot._rank_values import RankValues, difference, digests
from slurm_elastic.snapshot.state import flatten


def tree(step: int, best: float, **state: Any) -> Any:
    return flatten({"progress": {"step": step, "best": best}, "model": {"weight": tensor([1.0])}, **state}).tree


@pytest.fixture
def ranks() -> list[RankValues]:
    """The workers that copy for their nodes, of three nodes with two workers each."""
    store = HashStore()
    return [RankValues(rank, 3, 4, store) for rank in (0, 2, 4)]


def test_a_value_that_only_rank_0_has_is_named_once(ranks: list[RankValues], caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 40):
        for index, rank in enumerate(ranks):
            rank.saved(step, tree(step, 1e9 if index or step < 10 else 0.83))
    (line,) = caplog.messages
    assert line.startswith("snapshots: `progress.best`: ranks 0 and 2 differ at step 16 (0.83 and 1000000000.0), so no")
    assert "broadcast_object_list" in line
    assert "per_rank" in line


def test_one_that_differs_from_the_start_is_named_at_the_first_snapshot(
    ranks: list[RankValues], caplog: pytest.LogCaptureFixture
) -> None:
    for index, rank in enumerate(ranks):
        rank.saved(500, tree(500, 1.0, seed=index))
    assert "`seed`: ranks 0 and 2 differ at step 500 (0 and 1)" in caplog.text


def test_a_rank_that_is_ahead_of_rank_0_waits_for_nothing(
    ranks: list[RankValues], caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 5):
        ranks[1].saved(step, tree(step, 2.0))
    assert not caplog.messages
    for step in range(1, 5):
        ranks[0].saved(step, tree(step, 1.0))
    # A call at which no values are put there.
    ranks[1].saved(5, tree(5, 2.0))
    assert "ranks 0 and 2 differ at step 4" in caplog.text


def test_equal_values_and_other_tensors_are_no_difference(
    ranks: list[RankValues], caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 9):
        for index, rank in enumerate(ranks):
            rank.saved(step, tree(step, 1.0, noise=tensor([float(index)])))
    assert not caplog.messages


def test_a_store_that_is_gone_costs_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    values = RankValues(0, 3, 4)
    values.saved(1, tree(1, 1.0))
    values.saved(2, tree(2, 1.0))
    assert not caplog.messages


def test_a_round_of_one_node_has_no_store() -> None:
    RankValues(0, 1, 4, None).saved(1, tree(1, 1.0))


def test_long_values_are_compared_by_their_digests() -> None:
    first, second = (digests(flatten({"progress": {"epochs": [*range(n)]}}).tree) for n in (50, 51))
    found = difference(first, second)
    assert found is not None
    assert found[0] == "progress.epochs"
    assert all(len(each) == 16 for each in found[1:])
    assert difference({"a": "1"}, {}) == ("a", "1", "nothing")
