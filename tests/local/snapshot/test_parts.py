"""State of a rank's own and sharded state, over rounds with another number of ranks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurm_elastic import snapshot
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.hand_over import VARIABLE, Request, ask
from tests.local.snapshot.memories import Agents, in_worker, raised_by
from tests.local.waiting import eventually


def ranks(agents: Agents, *nodes: tuple[AgentMemory, int], **ended: bool) -> list[dict[str, str]]:
    """The variables of all workers of the next round, with the given number on each node."""
    counts = [count for _, count in nodes]
    formed = agents.next_round([agent for agent, _ in nodes], counts, **ended)
    found = [
        {**variables, "LOCAL_RANK": str(local)}
        for variables, (_, count) in zip(formed, nodes, strict=True)
        for local in range(count)
    ]
    return [{**each, "RANK": str(rank), "WORLD_SIZE": str(len(found))} for rank, each in enumerate(found)]


def saves(*steps: int) -> Any:
    def work() -> bool:
        rank = int(os.environ["RANK"])
        for step in steps:
            own = {"rank": rank, "noise": torch.full((100 + rank,), float(step))}
            snapshot.save(step, weight=torch.full((10,), float(step)), per_rank=own)
        return True

    return work


def loads() -> tuple[float, list[tuple[int, float, int]]]:
    """The weight, and of each old rank what it had of its own."""
    weight, per_rank = snapshot.load(weight=torch.zeros(1), per_rank=[])
    return float(weight[0]), [(own["rank"], float(own["noise"].mean()), len(own["noise"])) for own in per_rank]


def test_every_rank_of_the_next_round_gets_what_each_rank_had_of_its_own(agents: Agents) -> None:
    one, two, three = (agents.add(name) for name in ("one", "two", "three"))
    first = ranks(agents, (one, 2), (two, 1))
    assert in_worker(first[2], loads) == (0.0, [])
    assert all(in_worker(variables, saves(1, 2, 3, 4, 5)) for variables in first)
    expected = (5.0, [(0, 5.0, 100), (1, 5.0, 101), (2, 5.0, 102)])
    second = ranks(agents, (three, 1), (two, 1), (one, 2))
    assert [in_worker(variables, loads) for variables in second] == [expected] * 4
    # In a round that saved nothing, the ranks of the one before still count.
    assert [in_worker(variables, loads) for variables in ranks(agents, (one, 1), (two, 1))] == [expected] * 2
    # A rank was killed before it saved step 7.
    third = ranks(agents, (one, 1), (two, 1))
    assert in_worker(third[0], saves(6, 7))
    assert in_worker(third[1], saves(6))
    assert in_worker(ranks(agents, (two, 1), (one, 1))[0], loads) == (6.0, [(0, 6.0, 100), (1, 6.0, 101)])


def test_without_a_node_that_had_state_of_its_own_the_round_starts_from_disk(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = agents.add("one"), agents.add("two")
    for variables in ranks(agents, (one, 1), (two, 1)):
        assert in_worker(variables, saves(1))
    assert in_worker(ranks(agents, (one, 1))[0], loads) == (0.0, [])
    assert "holds part 1 of the 2 parts of step 1 of round 0" in caplog.text


def test_what_is_not_asked_for_is_not_read(agents: Agents) -> None:
    one = agents.add("one")
    assert in_worker(ranks(agents, (one, 1))[0], saves(1))
    assert in_worker(ranks(agents, (one, 1))[0], lambda: snapshot.load(weight=None).tolist()) == [1.0] * 10

    missing = raised_by(lambda: snapshot.load(weight=None, per_rank=[]))
    assert in_worker(ranks(agents, (one, 1))[0], lambda: snapshot.save(2, weight=0) is None)
    assert "the snapshot has no state 'per_rank', only weight" in in_worker(ranks(agents, (one, 1))[0], missing)


SHAPES = ((7, 3), (2,), (16,))


@pytest.fixture(scope="module")
def warm() -> None:
    """What torch imports with the first sharded tensor, the workers inherit."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model(0)
    dist.destroy_process_group()


def join_group() -> None:
    """Become a rank whose collectives do nothing; each rank runs alone here."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def model(value: float) -> dict[str, DTensor]:
    """Tensors that this rank has its shards of, and whose elements say which they are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for index, shape in enumerate(SHAPES):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + value
        chunks = torch.chunk(whole, world)
        local = chunks[rank] if rank < len(chunks) else whole[:0]
        size, stride = whole.size(), whole.stride()
        found[f"w{index}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
    return found


def saves_shards(*steps: int, own: bool = False) -> Any:
    def work() -> bool:
        join_group()
        for step in steps:
            with_own = {"per_rank": {"rank": dist.get_rank()}} if own else {}
            # Moments as of an optimizer, which has none before its first step.
            snapshot.save(step, model=model(1000 * step), moments=model(step), step=step, **with_own)
        return True

    return work


def loads_shards() -> int:
    """The step; elements that are not in their place are errors."""
    join_group()
    found, moments, step = snapshot.load(model=model(0), moments={}, step=0)
    for tensors, value in ((found, 1000 * step), (moments, step)):
        for name, expected in model(value).items():
            assert tensors[name].placements == expected.placements
            assert torch.equal(tensors[name].to_local(), expected.to_local()), name
    return int(step)


@pytest.mark.usefixtures("warm")
def test_sharded_state_is_restored_at_any_number_of_ranks(agents: Agents) -> None:
    nodes = [agents.add(f"n{number}") for number in range(3)]
    for variables in ranks(agents, (nodes[0], 2), (nodes[1], 1), (nodes[2], 1)):
        assert in_worker(variables, saves_shards(1, 2, 3, 4))
    three = ranks(agents, (nodes[2], 1), (nodes[0], 1), (nodes[1], 1))
    for variables in three:
        assert in_worker(variables, loads_shards) == 4
    for variables in three:
        assert in_worker(variables, saves_shards(5, own=True))
    for variables in ranks(agents, (nodes[0], 1), (nodes[1], 1), (nodes[2], 2))[1:]:
        assert in_worker(variables, loads_shards) == 5

    def whole() -> Any:
        weights, own = snapshot.load(model={}, per_rank=[])
        return {name: tensor.tolist() for name, tensor in weights.items()}, [each["rank"] for each in own]

    # A group that does not divide it any more, of one rank.
    (only,) = ranks(agents, (nodes[0], 1), (nodes[1], 0), (nodes[2], 0))
    tensors, own = in_worker(only, whole)
    assert tensors["w1"] == [5000.0, 5001.0]
    assert tensors["w2"] == [5000.0 + index for index in range(16)]
    assert own == [0, 1, 2]


@pytest.mark.usefixtures("warm")
def test_what_other_ranks_had_of_their_own_comes_without_their_shards(agents: Agents) -> None:
    nodes = [agents.add(f"n{number}") for number in range(3)]
    for variables in ranks(agents, *((node, 1) for node in nodes)):
        assert in_worker(variables, saves_shards(1, own=True))

    def work() -> list[int]:
        join_group()
        _, own = snapshot.load(model=model(0), per_rank=[])
        return [each["rank"] for each in own]

    assert in_worker(ranks(agents, *((node, 1) for node in nodes))[0], work) == [0, 1, 2]
    assert {*nodes[0]._round.borrowed} == {(1, ()), (2, ())}


def four_with_shards(agents: Agents) -> list[AgentMemory]:
    """Agents of four nodes whose workers have saved step 1."""
    nodes = [agents.add(f"n{number}") for number in range(4)]
    for variables in ranks(agents, *((node, 1) for node in nodes)):
        assert in_worker(variables, saves_shards(1))
    return nodes


THREE = (1, 1, 1, 0)
"""Workers on each of them; the last one holds its part, as a spare."""


def foreseen(node: AgentMemory) -> dict[Any, Any]:
    """Return what an agent has got for its workers before they have asked."""
    current = node._round
    eventually(lambda: bool(current.expected))
    wanted = {*current.expected}
    held = {each.copy.part for slot in node._all_slots() if (each := slot.contents()) is not None}
    wanted = {key for key in wanted if key[0] not in held}
    eventually(lambda: wanted <= current.borrowed.keys() and all(current.borrowed[key].done() for key in wanted))
    return dict(current.borrowed)


@pytest.mark.usefixtures("warm")
def test_shards_that_ranks_need_come_before_they_ask(agents: Agents) -> None:
    nodes = four_with_shards(agents)
    formed = ranks(agents, *zip(nodes, THREE, strict=True))[:3]
    before = [foreseen(node) for node in nodes[:3]]
    assert any(before)
    for variables in formed:
        assert in_worker(variables, loads_shards) == 1
    # Nothing else was asked for, and nothing came in vain.
    assert [node._round.borrowed for node in nodes[:3]] == before
    assert [node._round.asked for node in nodes[:3]] == [borrowed.keys() for borrowed in before]
    # Bytes that no rank of a node needs do not come.
    assert all(ranges is not None for borrowed in before for _part, ranges in borrowed)


@pytest.mark.usefixtures("warm")
def test_what_was_foreseen_wrongly_is_let_go_of_and_nothing_more_comes_when_workers_save(agents: Agents) -> None:
    nodes = four_with_shards(agents)
    variables = ranks(agents, *zip(nodes, THREE, strict=True))[0]
    assert foreseen(nodes[0])
    number = int(variables["SLURM_ELASTIC_ROUND"])
    ask(variables[VARIABLE], Request(number, part=3, ranges=((0, 4),)))
    assert [*nodes[0]._round.borrowed] == [(3, ((0, 4),))]
    ask(variables[VARIABLE], Request(number, writes=0))
    assert (nodes[0]._round.borrowed, nodes[0]._round.expected) == ({}, frozenset())


def test_an_agent_that_ends_while_it_gets_shards_says_nothing(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = four_with_shards(agents)
    part = AgentMemory._part

    def later(memory: AgentMemory, current: Any, *arguments: Any, **options: Any) -> Any:
        current.cancelled.wait()
        return part(memory, current, *arguments, **options)

    monkeypatch.setattr(AgentMemory, "_part", later)
    ranks(agents, *zip(nodes, THREE, strict=True))
    eventually(lambda: bool(nodes[0]._round.expected))
    agents.lose("n0")
    # An exception in a thread fails the test.
    for thread in threading.enumerate():
        if thread.name == "slurm-elastic-snapshot-fetch" and thread is not threading.current_thread():
            thread.join(0.2)


class ShowsShards(torch.nn.Module):
    """A sharded module that notes whether what it loads is in its own parameters already."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterDict({name: torch.nn.Parameter(each) for name, each in model(value).items()})

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            own = {name: each.to_local().data_ptr() for name, each in self.named_parameters()}  # type: ignore[attr-defined]
        self.has_it = [state_dict[name].to_local().data_ptr() == pointer for name, pointer in own.items()]
        return super().load_state_dict(state_dict, *arguments, **options)


@pytest.mark.usefixtures("warm")
def test_a_sharded_module_is_loaded_without_a_second_copy(agents: Agents) -> None:
    def save() -> bool:
        join_group()
        snapshot.save(1, model=ShowsShards(1000))
        return True

    def load() -> tuple[list[bool], bool]:
        join_group()
        found = ShowsShards(0)
        snapshot.load(model=found)
        loaded = (found.tensors[name].detach().to_local() for name in model(0))
        expected = (each.to_local() for each in model(1000).values())
        return found.has_it, all(map(torch.equal, loaded, expected))

    nodes = [agents.add(f"n{number}") for number in range(2)]
    for variables in ranks(agents, *((node, 1) for node in nodes)):
        assert in_worker(variables, save)
    for variables in ranks(agents, *((node, 1) for node in nodes)):
        assert in_worker(variables, load) == ([True, True, True], True)


def test_sharded_state_that_cannot_be_saved_is_named(agents: Agents, tmp_path: Any) -> None:
    (variables,) = ranks(agents, (agents.add("one"), 1))

    def raised() -> list[str]:
        join_group()
        shards = model(0)
        states = {"per_rank": shards}, {"whole": DTensor.from_local(torch.ones(2), shards["w0"].device_mesh)}
        errors = [raised_by(lambda state=state: snapshot.save(1, **state))() for state in states]
        snapshot.to_disk(tmp_path / "checkpoints")
        snapshot.load(step=0)
        return [*errors, raised_by(lambda: snapshot.save(1, model=shards))()]

    found = in_worker(variables, raised)
    assert [text.partition(":")[0] for text in found] == [
        "per_rank has a DTensor",
        # One that is not sharded is saved.
        "",
        "snapshot.save has sharded tensors (DTensor) or per_rank, and snapshot.load had none",
    ]
