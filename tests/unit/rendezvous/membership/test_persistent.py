"""Maps that are never changed behave as those of Python, few entries or many."""

from __future__ import annotations

import random

import pytest

from slurm_elastic.rendezvous.membership.persistent import NamedMap


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000])
def test_a_map_is_the_dict_of_what_was_set_and_removed(size: int) -> None:
    rng = random.Random(size)
    names = [f"n{number}/7.0/{number}" for number in range(2 * size + 1)]
    expected = dict.fromkeys(rng.sample(names, size), 0)
    tested: NamedMap[int] = NamedMap(expected)
    for step in range(2 * size):
        name = rng.choice(names)
        before, unchanged = tested, dict(expected)
        if name in expected and rng.random() < 0.5:
            del expected[name]
            tested = tested.without(name)
        else:
            expected[name] = step
            tested = tested.set(name, step)
        if step % 50 == 0:
            assert dict(before.items()) == unchanged
    more = dict.fromkeys(rng.sample(names, size // 2), -1)
    tested, expected = tested.update(more), {**expected, **more}
    assert dict(tested.items()) == {name: tested[name] for name in tested} == expected
    assert sorted(tested) == sorted(tested.keys()) == sorted(expected)
    assert sorted(tested.values()) == sorted(expected.values())
    assert len(tested) == len(expected)
    assert [(name in tested, tested.get(name, "none")) for name in names] == [
        (name in expected, expected.get(name, "none")) for name in names
    ]
