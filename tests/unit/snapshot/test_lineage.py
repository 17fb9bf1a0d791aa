"""The choice of the snapshot that a round starts from."""

from __future__ import annotations

import pytest

from slurm_elastic.snapshot.lineage import (
    Copy,
    HeldParts,
    Holder,
    Inventory,
    Origin,
    SnapshotId,
    choose,
    prepare,
    read_inventories,
    read_origin,
    slot_to_write,
    take_inventory,
    write,
)


def holds(node: str, *snapshots: tuple[int, int], digest: str = "00") -> str:
    copies = tuple(Copy(SnapshotId(*snapshot), digest) for snapshot in snapshots)
    return write(Inventory(copies, Holder(node, 7000), node))


def origin(*line: tuple[int, int]) -> str:
    """The record of a round that starts from the last of these."""
    steps = tuple(SnapshotId(*each) for each in line)
    return write(Origin(Copy(steps[-1], "00"), (), steps)) if steps else ""


def chosen(last_round: int | None, before: str, *inventories: str) -> tuple[int, int] | None:
    found = read_origin(choose(last_round, before, inventories)).copy
    return None if found is None else (found.id.round, found.id.step)


def test_a_run_without_snapshots_has_no_origin() -> None:
    assert choose(3, "", ["", ""]) == ""
    assert choose(None, "", [holds("a", (0, 5))]) == ""


def test_the_newest_snapshot_of_the_last_round_that_anyone_holds_is_chosen() -> None:
    assert chosen(0, "", holds("a", (0, 4), (0, 5)), holds("b", (0, 5), (0, 6)), "") == (0, 6)
    found = read_origin(choose(0, "", [holds("a", (0, 6)), holds("b", (0, 6))]))
    assert found.holders == (Holder("a", 7000), Holder("b", 7000))
    assert found.line == (SnapshotId(0, 6),)


def test_a_round_from_nothing_in_memory_forgets_all() -> None:
    found = choose(3, origin((2, 20)), [holds("cut off", (2, 25))])
    assert read_origin(found) == Origin(
        note="no agent that is left holds a snapshot since step 20 of round 2; it starts from no snapshot"
    )
    assert choose(3, origin((2, 20)), [""]) == found
    assert choose(4, found, [holds("cut off", (2, 25))]) == ""
    assert chosen(4, "", holds("cut off", (2, 25), (2, 10))) is None


def test_a_round_that_does_not_exist_yet_is_not_believed() -> None:
    assert chosen(3, origin((2, 20)), holds("liar", (7, 1)), holds("a", (3, 21))) == (3, 21)


def test_a_state_from_which_workers_fail_is_left_for_an_older_one_and_then_for_disk() -> None:
    held = holds("a", (0, 4), (0, 5), (1, 6))
    # Round 1 took a snapshot before its worker failed.
    first = choose(1, origin((0, 5)), [held], failed=True)
    assert read_origin(first).copy == Copy(SnapshotId(1, 6), "00")
    assert read_origin(first).note == ""
    # Round 2 started from it and took none.
    second = choose(2, first, [held], failed=True)
    assert read_origin(second).copy == Copy(SnapshotId(0, 5), "00")
    assert read_origin(second).note == "workers that started from step 6 of round 1 failed before the next snapshot"
    assert chosen(2, first, held) == (1, 6)
    held = holds("a", (0, 4), (0, 5))
    third = choose(3, second, [held], failed=True)
    assert chosen(3, second, held) == (0, 5)
    assert read_origin(third).copy == Copy(SnapshotId(0, 4), "00")
    fourth = read_origin(choose(4, third, [holds("a", (0, 4))], failed=True))
    assert fourth == Origin(
        note="workers that started from step 4 of round 0 failed before the next snapshot; it starts from no snapshot",
        below=4,
    )


def test_snapshots_that_differ_between_nodes_are_not_chosen_and_that_is_said() -> None:
    inventories = [holds("a", (0, 5)), holds("b", (0, 5), digest="01"), holds("c", (0, 4))]
    found = read_origin(choose(0, "", inventories))
    assert found.copy == Copy(SnapshotId(0, 4), "00")
    assert found.note == "step 5 of round 0 is not the same on a and b"
    alone = read_origin(choose(0, "", inventories[:2]))
    assert (alone.copy, alone.line) == (None, ())
    assert alone.note == f"{found.note}; it starts from no snapshot"


def test_the_snapshot_that_a_round_started_from_is_not_lost_to_a_copy_that_differs() -> None:
    before = choose(0, "", [holds("a", (0, 5))])
    assert chosen(1, before, holds("a", (0, 5)), holds("came back", (0, 5), digest="01")) == (0, 5)
    assert chosen(1, before, holds("came back", (0, 5), digest="01")) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"copies":[{"id":{"round":0}}]}', '{"copies":7}', "\x00"])
def test_what_cannot_be_read_counts_as_nothing(text: str) -> None:
    assert chosen(0, "", text, holds("a", (0, 1))) == (0, 1)
    assert chosen(0, text, text) is None
    assert read_origin(text) == Origin()


def test_an_origin_stays_short_over_many_rounds() -> None:
    text = ""
    for number in range(200):
        text = choose(number, text, [holds(f"node{node}", (number, 7)) for node in range(100)])
    assert len(text) < 1500
    assert read_origin(text).has(SnapshotId(199, 7))


COPIES = [Copy(SnapshotId(1, 3), "00"), Copy(SnapshotId(2, 20), "00"), Copy(SnapshotId(2, 21), "00")]
BEFORE = read_origin(origin((1, 9), (2, 20)))


def prepared(copies: list[Copy | None], line: Origin = BEFORE) -> tuple[list[int], int | None, bool]:
    """What an agent clears, from which slot its workers start, and whether that is fetched."""
    clear = [slot for slot, copy in enumerate(copies) if copy is not None and not line.keeps(copy)]
    return clear, *prepare([None if slot in clear else copy for slot, copy in enumerate(copies)], line)


def test_a_new_round_keeps_what_is_on_its_line_and_starts_from_the_own_copy() -> None:
    assert prepared([*COPIES]) == ([2], 1, False)
    assert prepared([None, COPIES[1], None]) == ([], 1, False)
    assert prepared([*COPIES], Origin()) == ([0, 1, 2], None, False)


def test_a_snapshot_that_is_not_here_is_fetched_into_the_slot_that_is_needed_least() -> None:
    assert prepared([None] * 3) == ([], 0, True)
    older = Copy(SnapshotId(2, 19), "00")
    assert prepared([older, COPIES[0], Copy(SnapshotId(2, 18), "00")]) == ([], 1, True)
    assert prepared([older, COPIES[2], COPIES[0]]) == ([1], 1, True)


def test_a_copy_with_other_plain_values_is_replaced() -> None:
    other = Copy(SnapshotId(2, 20), "01")
    assert prepared([COPIES[0], other, None]) == ([1], 1, True)


def test_an_agent_that_holds_two_snapshots_overwrites_the_older_one() -> None:
    one, two = SnapshotId(1, 9), SnapshotId(2, 5)
    assert [slot_to_write([None, None]), slot_to_write([one, None]), slot_to_write([None, one])] == [0, 1, 0]
    assert [slot_to_write([one, two]), slot_to_write([two, one])] == [0, 1]
    assert prepared([COPIES[0], COPIES[1]]) == ([], 1, False)
    # What the next round starts from takes the place of what is not on its line, or of the older one.
    assert prepared([COPIES[0], COPIES[2]]) == ([1], 1, True)
    assert prepared([COPIES[0], Copy(SnapshotId(2, 19), "00")]) == ([], 0, True)


def parted(node: str, parts: int, *held: int, snapshots: tuple[tuple[int, int], ...] = ((0, 6),)) -> str:
    """An agent with the state of all ranks of snapshots, and parts of them."""
    ids = [SnapshotId(*each) for each in snapshots]
    copies = [Copy(each, "00", parts) for each in ids]
    copies += [Copy.of_part(each, part, parts) for each in ids for part in held]
    return take_inventory(copies, Holder(node, 7000), node, 4096)


def test_a_snapshot_is_chosen_if_the_agents_together_hold_all_its_parts() -> None:
    found = read_origin(choose(0, "", [parted("a", 4, 0, 1), parted("b", 4, 3), parted("spare", 4, 2, 3)]))
    assert found.copy == Copy(SnapshotId(0, 6), "00", 4)
    assert found.holders_of(3) == (Holder("b", 7000), Holder("spare", 7000))
    assert found.holders_of(0) == (Holder("a", 7000),)
    assert found.holders_of(4) == ()


def test_a_snapshot_of_which_a_part_is_lost_is_not_chosen() -> None:
    lost = choose(0, "", [parted("a", 6, 0, 1), parted("b", 6, 3)])
    assert read_origin(lost) == Origin(
        note="no agent that is left holds part 2, 4 to 5 of the 6 parts of step 6 of round 0: the state of a rank's"
        " own, and shards, are lost with their node without --snapshot-replicas 1; it starts from no snapshot"
    )
    # The step before is whole: a rank was killed while it saved the newest.
    both = ((0, 5), (0, 6))
    found = read_origin(choose(0, "", [parted("a", 2, 0, snapshots=both), parted("b", 2, 1, snapshots=((0, 5),))]))
    assert found.copy == Copy(SnapshotId(0, 5), "00", 2)
    assert found.note == ""
    # Parts of another snapshot are no parts of this one.
    assert chosen(0, "", parted("a", 2, 0), parted("b", 2, 1, snapshots=((0, 7),))) is None
    # An agent that holds parts alone has not the state of all ranks.
    assert chosen(0, "", take_inventory([Copy.of_part(SnapshotId(0, 6), 0, 1)], Holder("a", 1), "a", 4096)) is None


def test_an_agent_that_pretends_to_hold_everything_costs_no_time() -> None:
    huge = write(Inventory((), Holder("c", 1), "c", (HeldParts(SnapshotId(0, 6), ((-(1 << 60), 1 << 60),)),)))
    assert chosen(0, "", parted("a", 4, 0), huge) == (0, 6)


def test_an_inventory_leaves_out_the_oldest_where_it_is_too_long() -> None:
    copies = [Copy(SnapshotId(0, step), "00", 400) for step in (1, 2)]
    copies += [Copy.of_part(SnapshotId(0, step), part, 400) for step in (1, 2) for part in range(0, 400, 2)]
    whole = take_inventory(copies, Holder("a", 1), "a", 100_000)
    (short,) = read_inventories([take_inventory(copies, Holder("a", 1), "a", len(whole) - 1)])
    assert [copy.id.step for copy in short.copies] == [held.id.step for held in short.parts] == [2]
    assert take_inventory(copies, Holder("a", 1), "a", 100) == ""


def test_an_older_snapshot_is_chosen_if_parts_of_the_newest_are_lost_and_that_one_is_named_for_the_disk() -> None:
    first = choose(0, "", [parted("n1", 1, 0, snapshots=((0, 6),))])
    assert read_origin(first).lost is None
    # In round 1 a second node has come and gone: it had one of two parts of step 7.
    held = parted("n1", 1, 0, snapshots=((0, 6),)), parted("n1", 2, 0, snapshots=((1, 7),))
    origin = read_origin(choose(1, first, held))
    assert origin.copy is not None
    assert (origin.copy.id, origin.lost) == (SnapshotId(0, 6), SnapshotId(1, 7))
    # The next round has no snapshot of its own, and may have started from disk.
    again = read_origin(choose(2, write(origin), held[:1]))
    assert (again.copy, again.lost) == (origin.copy, SnapshotId(1, 7))
    # Then what it started from goes with its nodes, and an agent that was cut off comes back.
    cut_off = parted("n1", 1, 0, snapshots=((0, 5),))
    assert read_origin(choose(2, write(origin), [cut_off])).lost == SnapshotId(1, 7)
    assert read_origin(choose(1, first, [cut_off])).lost == SnapshotId(0, 6)
    # Plain state has no parts, and no rank looks for a checkpoint.
    assert read_origin(choose(1, first, [parted("n1", 0, snapshots=((0, 5),))])).lost is None
    # It has one.
    later = parted("n1", 1, 0, snapshots=((0, 6), (2, 8)))
    assert read_origin(choose(2, write(origin), [later])).lost is None
    # Its workers failed from that state.
    older = parted("n1", 1, 0, snapshots=((0, 5), (0, 6)))
    assert read_origin(choose(2, write(origin), [older], failed=True)).lost is None


def test_parts_that_are_off_the_line_are_dropped() -> None:
    line = read_origin(origin((1, 9), (2, 20)))
    held = [Copy.of_part(SnapshotId(*each), 1, 4) for each in ((1, 9), (1, 10), (2, 20))]
    assert [line.keeps(copy) for copy in held] == [True, False, True]
    assert not any(Origin().keeps(copy) for copy in held)
