"""Which side of a cut network may go on."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest

from slurm_elastic.rendezvous.membership.config import Base, OnTie, has_quorum

NAMES = ("a", "b", "c", "d", "e")


def base(size: int, leader: str = "a") -> Base:
    return Base(3, NAMES[:size], leader)


@pytest.mark.parametrize(
    ("size", "leader", "present", "gone", "own", "allowed"),
    [
        # A tie, which the leader decides wherever it is, as long as nobody knows that it is gone.
        (2, "a", "a", "", "a", True),
        (2, "a", "a", "", "x", True),
        (2, "a", "b", "", "b", False),
        (2, "a", "b", "", "x", False),
        (4, "a", "ab", "", "b", True),
        (4, "a", "cd", "", "c", False),
        # A leader that is no member and still leads.
        (2, "x", "b", "", "x", True),
        (4, "x", "cd", "", "x", True),
        # It is on neither side, or on the other: then nobody goes on.
        (2, "x", "a", "", "a", False),
        (2, "x", "b", "", "b", False),
        # It is known to be gone: the lowest rank decides.
        (2, "x", "a", "x", "a", True),
        (2, "x", "b", "x", "b", False),
        (4, "x", "cd", "xab", "c", True),
        (5, "x", "bc", "xa", "c", True),
        (5, "x", "de", "xa", "d", False),
    ],
)
def test_a_tie(size: int, leader: str, present: str, gone: str, own: str, allowed: bool) -> None:
    assert has_quorum(base(size, leader), set(present), set(gone), own) is allowed


@pytest.mark.parametrize("on_tie", OnTie)
def test_anybody_may_begin(on_tie: OnTie) -> None:
    assert has_quorum(None, set(), set(), "x", on_tie)
    # Half of nobody is no tie.
    assert has_quorum(base(3), set(), {"a", "b", "c"}, "x", on_tie)


def subsets(names: tuple[str, ...]) -> chain[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("leader", ["a", "b", "outside"])
def test_never_two_sides(size: int, leader: str) -> None:
    # Every way to be gone, to know of it or not, to be split in two, and every pair of agents that lead the two sides.
    # A leader that is no member, as the coordinator, is on a side by leading there only.
    last = base(size, leader)
    all_agents = sorted({*last.members, leader, "x", "y"})
    for gone in subsets(tuple(sorted({*last.members, leader}))):
        living = [name for name in all_agents if name not in gone]
        for split in product((0, 1), repeat=len(living)):
            sides = [{name for name, side in zip(living, split, strict=True) if side == number} for number in (0, 1)]
            allowed = [
                any(
                    has_quorum(last, side - {"outside"}, set(known), own)
                    for known in subsets(gone)
                    for own in sorted(side)
                )
                for side in sides
            ]
            # Only where no member can be anywhere may two begin; then the epoch decides which.
            assert not all(allowed) or not set(last.members) - set(gone), (gone, sides)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("leader", ["a", "outside"])
def test_no_half_goes_on_where_none_shall(size: int, leader: str) -> None:
    # Whatever is known: it never allows what the leader's half would not be allowed, and no half at all.
    last = base(size, leader)
    for gone in subsets(tuple(sorted({*last.members, leader}))):
        rest = set(last.members) - set(gone)
        for present in subsets(tuple(sorted(rest))):
            for own in (*present, "outside", "x"):
                strict = has_quorum(last, set(present), set(gone), own, OnTie.NONE)
                assert not strict or has_quorum(last, set(present), set(gone), own, OnTie.LEADER)
                assert strict is (2 * len(present) > len(rest) or not rest)
