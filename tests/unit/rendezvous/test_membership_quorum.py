"""Which side of a cut network may go on."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest

from slurm_elastic.rendezvous.membership import Base, has_quorum, unaccounted

NAMES = ("a", "b", "c", "d", "e")


def base(size: int, leader: str = "a") -> Base:
    return Base(3, NAMES[:size], NAMES[:size], leader)


@pytest.mark.parametrize(
    ("size", "present", "gone", "own", "allowed"),
    [
        (3, "bc", "", "b", True),
        (3, "c", "", "c", False),
        # Half of them: the side of the old leader.
        (2, "a", "", "a", True),
        (2, "b", "", "b", False),
        (2, "b", "a", "b", True),
        (4, "cd", "", "c", False),
        (4, "cd", "a", "c", True),
        # The leader is known to be gone, and of the three others only one is here.
        (4, "d", "a", "d", False),
        (4, "d", "abc", "d", True),
        # Half of those left, without the leader, with and without the lowest rank.
        (5, "bc", "a", "c", True),
        (5, "de", "a", "d", False),
        # Nobody of the last round is left.
        (3, "", "abc", "x", True),
        (3, "x", "ab", "x", False),
    ],
)
def test_who_may_go_on(size: int, present: str, gone: str, own: str, allowed: bool) -> None:
    assert has_quorum(base(size), set(present), set(gone), own) is allowed


def test_anybody_may_begin() -> None:
    assert has_quorum(None, set(), set(), "x")


def subsets(names: tuple[str, ...]) -> chain[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("leader", ["a", "b", "outside"])
def test_never_two_sides(size: int, leader: str) -> None:
    # Every way to be gone, to know of it or not, to be split in two, and every pair of agents that lead the two sides.
    last = base(size, leader)
    everybody = sorted({*last.members, leader, "x", "y"})
    for gone in subsets(tuple(sorted({*last.members, leader}))):
        living = [name for name in everybody if name not in gone]
        for split in product((0, 1), repeat=len(living)):
            sides = [{name for name, side in zip(living, split, strict=True) if side == number} for number in (0, 1)]
            allowed = [
                any(has_quorum(last, side, set(known), own) for known in subsets(gone) for own in sorted(side))
                for side in sides
            ]
            # Only where no member can be anywhere may two begin; then the epoch decides which.
            assert not all(allowed) or not set(last.members) - set(gone), (gone, sides)


def test_who_is_missing() -> None:
    assert unaccounted(base(4), {"b"}, {"c"}) == ("a", "d")
    assert unaccounted(None, set(), set()) == ()
