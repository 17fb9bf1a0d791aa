"""Every sample of every epoch exactly once, and the same batch, whatever becomes of the world size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from slurm_elastic.data import BatchPlan, ElasticSampler, batch_plan

State = dict[str, object]


def samplers(size: int, batch_size: int, world_size: int, state: State | None = None) -> list[ElasticSampler]:
    group = [ElasticSampler(size, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in group:
        sampler.load_state_dict(state or sampler.state_dict())
    return group


def deal(group: list[ElasticSampler]) -> list[list[list[int]]]:
    """What each rank is given in each step: deal(...)[step][rank]."""
    ranks = [list(sampler) for sampler in group]
    assert {len(steps) for steps in ranks} == {-(-(each.size - each.consumed) // each.batch_size) for each in group}
    return [list(step) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("case", range(200))
def test_every_sample_once_through_any_sequence_of_world_sizes(case: int) -> None:
    rng = random.Random(case)
    size, batch_size = rng.randint(1, 120), rng.randint(1, 40)
    state: State = {"size": size, "seed": rng.randint(0, 9), "epoch": rng.randint(0, 9), "consumed": 0}
    seen = Counter[int]()
    while state["consumed"] != size:
        group = samplers(size, batch_size, rng.randint(1, 9), state)
        steps = deal(group)
        for step in steps[: rng.randint(0, len(steps))]:
            for sampler, ids in zip(group, step, strict=True):
                assert len(ids) == max(1, sampler.share)
                seen.update(ids[: sampler.share])
                sampler.step()
            (position,) = {sampler.consumed for sampler in group}
            assert position == seen.total()
        state = group[0].state_dict()
    assert seen == Counter(range(size))


def test_a_rank_that_is_idle_in_the_last_step_counts_for_nothing() -> None:
    group = samplers(103, 10, 4, {"size": 103, "seed": 0, "epoch": 0, "consumed": 100})
    assert [sampler.weight for sampler in group] == [4 / 3, 4 / 3, 4 / 3, 0.0]


def test_epochs_and_seeds_have_orders_of_their_own_or_none() -> None:
    def order(seed: int | None, epoch: int) -> list[int]:
        sampler = ElasticSampler(50, 50, seed=seed, rank=0, world_size=1)
        sampler.set_epoch(epoch)
        return next(iter(sampler))

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(5, 0)
    assert order(None, 0) == order(None, 3) == list(range(50))


def test_indices_drawn_ahead_do_not_move_the_position() -> None:
    (sampler,) = samplers(20, 4, 1)
    ahead = iter(sampler)
    first, second = next(ahead), next(ahead)
    assert [step[0] for step in deal([sampler])][:2] == [first, second]
    sampler.step()
    assert deal([sampler])[0][0] == second
    assert next(ahead) != second
    assert len(sampler) == 5, "of the whole epoch"


def test_epochs_go_on_in_the_middle_of_one() -> None:
    (sampler,) = samplers(6, 4, 1, {"size": 6, "seed": 0, "epoch": 1, "consumed": 4})
    taken = []
    for epoch in sampler.epochs(3):
        for ids in sampler:
            taken.append((epoch, len(ids)))
            sampler.step()
    assert taken == [(1, 2), (2, 4), (2, 2)]
    with pytest.raises(ValueError, match="epoch 1 has no step left"):
        samplers(6, 4, 1, {"size": 6, "seed": 0, "epoch": 1, "consumed": 6})[0].step()
    sampler.set_epoch(sampler.epoch)
    assert sampler.consumed == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ElasticSampler(0, 4), "0 samples in steps of 4: give at least 1 of both"),
        (lambda: ElasticSampler(4, 4, rank=2, world_size=2), "rank 2 of a world of 2: ranks are 0 to 1"),
        (
            lambda: ElasticSampler(4, 4).load_state_dict({"size": 5, "seed": 0, "epoch": 0, "consumed": 0}),
            "the checkpoint is of a data set with 5 samples, this one has 4",
        ),
        (
            lambda: batch_plan(64, 8, world_size=3),
            "global_batch 64 is no multiple of 3 ranks times micro_batch 8: give 48 or 72; world sizes that fit are "
            "1, 2, 4, 8",
        ),
        (lambda: batch_plan(10, 8, world_size=3), "global_batch 10 is no multiple .*: give 24$"),
        (lambda: batch_plan(8, 0, world_size=3), "give at least 1 of each"),
    ],
)
def test_what_cannot_be_says_what_can(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_batch_stays_the_same_in_the_world_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_plan(96, 8, world_size=4) == BatchPlan(96, 8, 3, 4)
    assert batch_plan(96, 8, world_size=3).per_rank == 32
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert batch_plan(96, 8).accumulation == 6
    assert (ElasticSampler(9, 3).rank, ElasticSampler(9, 3).world_size) == (1, 2)
