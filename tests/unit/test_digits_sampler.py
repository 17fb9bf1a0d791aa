"""The example's sampler: every sample of every epoch exactly once, whatever becomes of the world size."""

import importlib.util
import random
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits.py"


@pytest.fixture(scope="module")
def digits():
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def deal(digits: ModuleType, size: int, progress: object, batch_size: int, world_size: int) -> list[list[list[int]]]:
    """What each rank is given in each step: deal(...)[step][rank]."""
    samplers = [digits.RestOfEpoch(size, progress, batch_size, rank, world_size) for rank in range(world_size)]
    ranks = [list(sampler) for sampler in samplers]
    assert [len(steps) for steps in ranks] == [len(sampler) for sampler in samplers]
    return [list(step) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("case", range(200))
def test_every_sample_once_through_any_sequence_of_world_sizes(digits, case):
    rng = random.Random(case)
    size, batch_size = rng.randint(1, 120), rng.randint(1, 40)
    progress = digits.Progress(seed=rng.randint(0, 9), epoch=rng.randint(0, 9))
    seen = Counter()
    while progress.consumed < size:
        steps = deal(digits, size, progress, batch_size, world_size=rng.randint(1, 9))
        for step in steps[: rng.randint(0, len(steps))]:
            for ids in step:
                seen.update(ids)
            progress.consumed += min(batch_size, size - progress.consumed)
            assert progress.consumed == seen.total()
    assert seen == Counter(range(size))


def test_a_step_trains_on_the_same_samples_at_any_world_size(digits):
    progress = digits.Progress(seed=1, consumed=20)
    alone = [sorted(step[0]) for step in deal(digits, 103, progress, batch_size=10, world_size=1)]
    for world_size in (2, 3, 7, 16):
        together = deal(digits, 103, progress, batch_size=10, world_size=world_size)
        assert [sorted(chain(*step)) for step in together] == alone


def test_the_last_step_is_dealt_as_evenly_as_it_goes_and_may_leave_a_rank_without_samples(digits):
    last = deal(digits, 103, digits.Progress(seed=0), batch_size=10, world_size=4)[-1]
    assert [len(ids) for ids in last] == [1, 1, 1, 0]


def test_epochs_and_seeds_have_orders_of_their_own(digits):
    def order(seed: int, epoch: int) -> list[int]:
        progress = digits.Progress(seed=seed, epoch=epoch)
        return deal(digits, 50, progress, batch_size=50, world_size=1)[0][0]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(5, 0)


def test_ids_drawn_ahead_do_not_move_the_position(digits):
    progress = digits.Progress(seed=0)
    ahead = iter(digits.RestOfEpoch(20, progress, 4, 0, 1))
    first, second = next(ahead), next(ahead)
    assert [step[0] for step in deal(digits, 20, progress, 4, 1)][:2] == [first, second]
    progress.consumed = 4
    assert deal(digits, 20, progress, 4, 1)[0][0] == second
