"""What a worker keeps from one snapshot to the next, in the memory of its slots, and what it must not keep."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from slurm_elastic.snapshot import _slot_writer
from slurm_elastic.snapshot import memory as memory_module
from slurm_elastic.snapshot._slot_writer import SlotWriter
from slurm_elastic.snapshot._worker_side import WorkerMemory
from slurm_elastic.snapshot.hand_over import Answer
from slurm_elastic.snapshot.lineage import SLOTS, Copy, Protection, SnapshotId
from slurm_elastic.snapshot.memory import Contents, OutOfMemoryError, Slot
from slurm_elastic.snapshot.state import Describer, table_of


class Saver:
    """A worker without an agent, and a worker of the next round that reads what it has saved."""

    def __init__(self) -> None:
        self.slots = [Slot.make() for _ in range(SLOTS)]
        self._memory = WorkerMemory(self.slots, Answer(), 0, writes=True)
        self._step = 0
        self._names: tuple[str, ...] = ()

    def save(self, state: Mapping[str, Any], *, check_finite: bool = False) -> None:
        self._step += 1
        self._names = tuple(state)
        self._memory.save(self._step, state, None, check_finite=check_finite)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return step and state of the newest snapshot."""
        steps = [0 if (found := slot.contents()) is None else found.copy.id.step for slot in self.slots]
        reader = WorkerMemory(self.slots, Answer(steps.index(max(steps))), 1, writes=False)
        loaded = reader.load(lambda: dict.fromkeys(self._names))
        assert loaded is not None
        return max(steps), loaded

    def digests(self) -> list[str]:
        """Return the digests of the snapshots, oldest first."""
        found = [contents.copy for slot in self.slots if (contents := slot.contents()) is not None]
        return [copy.digest for copy in sorted(found, key=lambda copy: copy.id)]


def same(one: Any, two: Any) -> bool:
    """Return True if two states are equal in values, types, and types and shapes of tensors."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(two, torch.Tensor)
            and (one.dtype, one.shape) == (two.dtype, two.shape)
            and torch.equal(one.detach().resolve_conj().resolve_neg(), two)
        )
    if isinstance(one, dict):
        # The order of keys is that of an optimizer's parameters.
        return type(two) is dict and same([*one], [*two]) and same([*one.values()], [*two.values()])
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and repr(one) == repr(two)


BASE = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"a": BASE}, {"a": BASE + 1}, id="another tensor of the same shape"),
        pytest.param({"a": BASE}, {"a": BASE.to(torch.int32)}, id="another type of the same size"),
        pytest.param({"a": BASE}, {"a": BASE.double()}, id="a wider type"),
        pytest.param({"a": BASE}, {"a": BASE.reshape(4, 3)}, id="another shape of the same size"),
        pytest.param({"a": BASE}, {"a": (BASE + 5).reshape(4, 3).T}, id="not contiguous"),
        pytest.param({"a": BASE}, {"a": torch.arange(20.0).as_strided((3, 4), (2, 1))}, id="overlapping elements"),
        pytest.param({"a": BASE}, {"a": torch.tensor(7.0).expand(3, 4)}, id="expanded"),
        pytest.param({"a": BASE, "b": BASE + 1}, {"a": BASE, "b": BASE}, id="one tensor twice"),
        pytest.param({"a": BASE[:2], "b": BASE[1:]}, {"a": BASE[1:], "b": BASE[:2]}, id="overlapping storages"),
        pytest.param({"a": BASE}, {"a": torch.nn.Parameter(BASE * 2)}, id="needs a gradient"),
        pytest.param({"a": BASE}, {"a": BASE, "b": BASE}, id="a new tensor"),
        pytest.param({"a": BASE, "b": BASE + 1}, {"b": BASE, "a": BASE + 1}, id="another order"),
        pytest.param({"a": {"x": BASE, "y": 1}}, {"a": {"x": 1, "y": BASE}}, id="a tensor in another place"),
        pytest.param({"a": BASE}, {"a": torch.zeros(100_000)}, id="larger"),
        pytest.param({"a": BASE, "b": BASE}, {"a": torch.empty(0, 4), "b": BASE}, id="empty"),
        pytest.param({"a": BASE}, {"a": 3}, id="no tensors"),
        pytest.param({"a": torch.view_as_complex(BASE.reshape(3, 2, 2))}, {"a": BASE.cfloat().conj()}, id="conjugate"),
        pytest.param({"a": BASE}, {"a": torch.view_as_complex(BASE.reshape(3, 2, 2)).conj().imag}, id="negative view"),
        pytest.param({"a": 1}, {"a": True}, id="a boolean that equals a number"),
        pytest.param({"a": 1}, {"a": 1.0}, id="a float that equals a number"),
        pytest.param({"a": 0.0}, {"a": -0.0}, id="a zero with a sign"),
        pytest.param({"a": {1: "x"}}, {"a": {True: "x"}}, id="a key that equals another"),
        pytest.param({"a": {"k": 1}}, {"a": {"k": 1, "l": 1}}, id="a new key"),
        pytest.param({"a": {"k": 1, "l": 2}}, {"a": {"l": 2, "k": 1}}, id="another order of keys"),
        pytest.param({"a": [1, 2]}, {"a": (1, 2)}, id="a tuple for a list"),
        pytest.param({"a": "x"}, {"a": b"x"}, id="bytes for text"),
        pytest.param({"a": {"b": None}}, {"a": {"b": {}}}, id="an empty dict for nothing"),
        pytest.param({"a": {"deep": [{"k": (1, [2])}]}}, {"a": {"deep": [{"k": (1, [3])}]}}, id="a deep value"),
        pytest.param({"a": 1 << 70}, {"a": (1 << 70) + 1}, id="a large number"),
        pytest.param({"a": float("nan")}, {"a": float("inf")}, id="not finite"),
    ],
)
def test_every_snapshot_has_the_state_of_its_step(one: dict[str, Any], other: dict[str, Any]) -> None:
    saver = Saver()
    # Each of the slots is written by both states, after itself and after the other.
    for turn, state in enumerate([one, other, one, other, other, other, other, one, one], start=1):
        saver.save(state)
        step, found = saver.newest()
        assert step == turn
        assert same(state, found), found


def test_a_tensor_that_is_trained_in_place_is_copied_at_each_step() -> None:
    saver, weights, progress = Saver(), torch.zeros(5), {"step": 0}
    for step in range(1, 8):
        weights += 1
        progress["step"] = step
        saver.save({"weights": weights, "progress": progress})
        assert same({"weights": torch.full((5,), float(step)), "progress": {"step": step}}, saver.newest()[1])


def test_a_copy_is_no_part_of_what_autograd_records() -> None:
    writer = SlotWriter([Slot.make()])
    tensors = [torch.nn.Parameter(BASE.clone()), BASE]
    table = table_of(tensors)
    writer.write(Copy(SnapshotId(0, 1), "0" * 16), Describer().describe({}, table), table, tensors)
    (views,) = [views for _, _, views in writer._views.values()]
    assert [view.requires_grad for view in views] == [False, False]


class Phase(enum.IntEnum):
    """A plain value of a type of its own."""

    WARM_UP = 1
    MAIN = 2


def test_plain_values_of_derived_types_are_found_to_change() -> None:
    saver = Saver()
    for phase in (Phase.WARM_UP, Phase.MAIN, Phase.WARM_UP, Phase.WARM_UP):
        saver.save({"phase": phase, "names": {"phase": phase}})
        assert saver.newest()[1] == {"phase": int(phase), "names": {"phase": int(phase)}}


def test_digests_are_equal_if_and_only_if_plain_values_are() -> None:
    one, two = Saver(), Saver()
    for number, (ours, theirs) in enumerate(((1, 1), (2, 2), (3, True))):
        one.save({"w": BASE, "progress": {"step": ours}, "same": [1, "x"]})
        # Another tree of the same values, and other elements.
        two.save({"w": BASE + number, "progress": {"step": theirs}, "same": [1, "".join(["x"])]})
    assert [a == b for a, b in zip(one.digests(), two.digests(), strict=True)] == [True, True, False]
    assert len({*one.digests()}) == 3


class OneByOne(torch.Tensor):
    """A tensor of a library that copies one at a time."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_copy_:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_that_has_no_copy_of_many_is_copied() -> None:
    saver = Saver()
    saver.save({"a": BASE, "b": (BASE + 1).as_subclass(OneByOne)})
    assert same({"a": BASE, "b": BASE + 1}, saver.newest()[1])


def test_memory_that_is_missing_when_the_state_grows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver()
    saver.save({"a": BASE})
    monkeypatch.setattr(memory_module, "free_memory", lambda: 1 << 10)
    saver.save({"a": BASE + 1})
    with pytest.raises(OutOfMemoryError, match="snapshots need 3 x"):
        saver.save({"a": torch.zeros(1 << 16)})
    with pytest.raises(OutOfMemoryError, match="snapshots need 3 x"):
        saver.save({"a": BASE, "text": "x" * (1 << 16)})
    assert same((2, {"a": BASE + 1}), saver.newest())


def written(writer: SlotWriter, step: int) -> int:
    """Write a snapshot; return the slot that has it."""
    tensors = [torch.full((3,), float(step))]
    table = table_of(tensors)
    writer.write(Copy(SnapshotId(0, step), "0" * 16), Describer().describe({"a": {"x": 0}}, table), table, tensors)
    (found,) = [index for index, slot in enumerate(writer.slots) if holds(slot) == step]
    return found


def holds(slot: Slot) -> int | None:
    """Return the step that a slot holds."""
    contents = slot.contents()
    return None if contents is None else contents.copy.id.step


def test_a_writer_sees_what_its_agent_does_to_the_slots_between_snapshots() -> None:
    writer = SlotWriter([Slot.make() for _ in range(SLOTS)])
    agent = [Slot(os.dup(slot.descriptor)) for slot in writer.slots]
    order = [written(writer, step) for step in range(1, 7)]
    assert order[:3] == order[3:]
    # Slots with steps 4, 5 and 6: the oldest is being written to disk.
    agent[order[0]].busy = True
    assert written(writer, 7) == order[1]
    agent[order[0]].busy = False
    assert written(writer, 8) == order[0]
    # Steps 6, 7 and 8: the newest is gone.
    agent[order[0]].clear()
    assert written(writer, 9) == order[0]
    # Steps 6, 7 and 9: the oldest is safe.
    agent[0].protection = Protection(safe=SnapshotId(0, 6))
    assert written(writer, 10) == order[1]
    agent[0].protection = Protection(safe=SnapshotId(0, 9))
    assert written(writer, 11) == order[2]
    agent[0].protection = Protection(take=SnapshotId(0, 9))
    assert written(writer, 12) == order[1]


def test_an_agent_sees_a_snapshot_that_has_grown_beyond_its_mapping() -> None:
    slot = Slot.make()
    other = Slot(os.dup(slot.descriptor))
    assert other.contents() is None
    slot.grow(1 << 20)
    slot.fill(Contents(Copy(SnapshotId(0, 1), "0" * 16), 1 << 19, 2), lambda: None)
    assert other.contents() == slot.contents() is not None
    assert len(other.memory()) == 1 << 20


def test_a_small_snapshot_takes_no_system_call_and_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, counted = Saver(), {"stat": 0, "copy": 0}
    state = {"model": {str(index): BASE + index for index in range(20)}, "progress": {"step": 0}}
    for _ in range(SLOTS):
        saver.save(state)
    stat, copy = os.fstat, torch._foreach_copy_

    def counts(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            counted[what] += 1
            return call(*arguments)

        return called

    with monkeypatch.context() as patched:
        patched.setattr(memory_module.os, "fstat", counts("stat", stat))
        patched.setattr(torch, "_foreach_copy_", counts("copy", copy))
        patched.setattr(_slot_writer, "require_memory", None)
        saver.save(state)
    assert counted == {"stat": 0, "copy": 1}
    assert same(state, saver.newest()[1])
