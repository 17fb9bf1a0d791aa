"""Training state to bytes and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slurm_elastic.snapshot import state as state_module


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    tree, tensors, _ = state_module.flatten(state)
    table = state_module.table_of(tensors)
    memory = bytearray(table.size)
    for tensor, place in zip(tensors, table.places, strict=True):
        if place.size:
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            memory[place.offset : place.offset + place.size] = bytes(raw.tolist())
    return state_module.rebuild(
        *state_module.read_description(state_module.Describer().describe(tree, table), memoryview(memory))
    )


def test_plain_values_come_back_as_they_were() -> None:
    state = {
        "progress": {"epoch": 3, 7: [1, 2.5, None, True], (1, "a"): (b"\x00\xff", "é"), "empty": {}},
        "best": math.inf,
        "size": torch.Size([2, 3]),
    }
    found = through_bytes(state)
    assert found == {**state, "size": (2, 3)}
    assert isinstance(found["progress"][(1, "a")], tuple)
    assert math.isnan(through_bytes({"loss": math.nan})["loss"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
def test_tensors_come_back_in_memory_of_their_own(dtype: torch.dtype) -> None:
    state = {"a": torch.tensor([[0, 1, 2], [1, 0, 1]]).to(dtype), "b": {"c": torch.tensor(1).to(dtype)}}
    found = through_bytes(state)
    assert torch.equal(found["a"], state["a"])
    assert found["a"].dtype is dtype
    assert torch.equal(found["b"]["c"], state["b"]["c"])
    assert found["b"]["c"].shape == ()


def test_views_parameters_and_empty_tensors() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    state = {"turned": matrix.T, "part": matrix[:, 1], "none": torch.empty(0, 3), "p": torch.nn.Parameter(matrix)}
    found = through_bytes(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not found["p"].requires_grad


def test_model_and_optimizer_go_on_as_if_nothing_had_been() -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
        return model(torch.rand(2, 4, generator=torch.Generator().manual_seed(0)))

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made()
    steps(model, optimizer)
    saved = through_bytes({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, other_optimizer = made()
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(steps(model, optimizer), steps(other, other_optimizer))


def test_what_a_snapshot_cannot_hold_is_named() -> None:
    with pytest.raises(state_module.StateError, match=r"^progress\.best\.1 is a set; a snapshot holds tensors"):
        state_module.flatten({"progress": {"best": [1, {2}]}})
    with pytest.raises(state_module.StateError, match=r"^m\.w is a torch\.sparse_coo tensor; .*to_dense"):
        state_module.flatten({"m": {"w": torch.eye(2).to_sparse()}})


def test_the_path_of_what_a_snapshot_cannot_hold_leads_to_it() -> None:
    wanted = {2}
    state = {"a": {"b": [1, (2, {"c": {1}})]}, "z": 1}
    with pytest.raises(state_module.StateError, match=r"^a\.b\.1\.1\.c is a set; "):
        state_module.flatten(state)
    with pytest.raises(state_module.StateError, match=r"^wanted is a set; "):
        state_module.flatten({"a": 1, "wanted": wanted})
    # A part of a key is named by the dict and its place in the key.
    with pytest.raises(state_module.StateError, match=r"^a\.b\.1 is a frozenset; "):
        state_module.flatten({"a": {"b": {(1, frozenset({2})): 1}}})


def test_only_what_has_changed_is_encoded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    encode = state_module._encode
    monkeypatch.setattr(state_module, "_encode", lambda tree: encoded.append(tree) or encode(tree))
    describer, table = state_module.Describer(), state_module.table_of([])
    for step in range(3):
        encoded.clear()
        tree = state_module.flatten({"optimizer": {"lr": 0.1, "groups": [1, 2]}, "progress": {"step": step}}).tree
        assert describer.describe(tree, table) == state_module.Describer().describe(tree, table)
        # The other half of what is encoded is of `describe`.
        assert encoded.count(tree["optimizer"]) == (2 if step == 0 else 1)
        assert encoded.count(tree["progress"]) == 2


def test_a_description_is_not_believed_beyond_its_memory() -> None:
    tree, tensors, _ = state_module.flatten({"a": torch.ones(8)})
    description = state_module.Describer().describe(tree, state_module.table_of(tensors))
    with pytest.raises(ValueError, match="a tensor of 32 bytes at 0 in 16 bytes"):
        state_module.read_description(description, memoryview(bytearray(16)))
    with pytest.raises((ValueError, AttributeError)):
        state_module.read_description(description.replace(b"float32", b"nn"), memoryview(bytearray(64)))
