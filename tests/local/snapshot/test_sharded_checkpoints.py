"""Sharded state and that of a rank's own on disk: each node writes its parts, and any number of ranks reads them."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from slurm_elastic import snapshot
from slurm_elastic.agent.forkserver._processes import ForkedProcess
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.stored import CheckpointError, Stored
from slurm_elastic.snapshot.disk.writer import Order, Outcome
from slurm_elastic.snapshot.hand_over import Directory
from slurm_elastic.snapshot.memory import Slot
from slurm_elastic.snapshot.sharding import Planner, Region
from tests.local.snapshot.memories import Agents, Fork, meet, start_worker, together, with_store
from tests.local.snapshot.test_checkpoints import flip, names
from tests.local.snapshot.test_parts import SHAPES, join_group, model, ranks, warm
from tests.local.waiting import eventually

__all__ = ["warm"]

pytestmark = pytest.mark.usefixtures("warm")
WRITES = True


def start(directory: Path, every: float = 600.0) -> tuple[int, list[int]]:
    """Load what there is; returns the step, and the old ranks. Elements that are not in their place are errors."""
    join_group()
    snapshot.to_disk(directory, every=every)
    found, moments, step, per_rank = snapshot.load(model=model(0), moments={}, step=0, per_rank=[])
    for tensors, value in ((found, 1000 * step), (moments, step)) if step else ():
        for name, expected in model(value).items():
            assert tensors[name].placements == expected.placements
            assert torch.equal(tensors[name].to_local(), expected.to_local()), name
    return int(step), [own["rank"] for own in per_rank]


def save(step: int) -> None:
    own = {"rank": dist.get_rank(), "noise": torch.full((3,), float(step)), "raw": b"\0", "pair": (1, None)}
    snapshot.save(step, model=model(1000 * step), moments=model(step), step=step, per_rank=own)


def trains(directory: Path, *steps: int) -> Any:
    def work() -> tuple[int, list[int]]:
        started = start(directory)
        for step in steps:
            save(step)
        return started

    return work


def warm_up(directory: Path, *agents: AgentMemory) -> None:
    """The processes that write have imported torch, for which a slow machine takes longer than agents wait."""
    for agent in agents:
        agent._disk._process.carry_out(Order(Directory(str(directory), 0.0, 1, 9), CheckpointId(9, 9), "discard"))


def test_each_node_writes_its_parts_and_another_world_starts_from_them(agents: Agents, directory: Path) -> None:
    one, two = agents.add("one"), agents.add("two")
    assert together(ranks(agents, (one, 2), (two, 1)), trains(directory, 1, 2, 3)) == [(0, [])] * 3
    warm_up(directory, one, two)
    # One of them leaves as announced. What it alone has is on disk before the other one joins.
    with ThreadPoolExecutor() as pool:
        left = pool.submit(agents.leave, "two", 60.0)
        formed = ranks(agents, (one, 2), members_leave=True)
        left.result()
    name = "start-000001.step-000000000003"
    assert names(directory) == [name]
    by_torch_alone(directory / name)
    no_flipped_bit_is_loaded(directory / name)
    expected = (3, [0, 1, 2])
    assert together(formed, trains(directory, 4)) == [expected] * 2

    # What is in memory is newer, and is written at once.
    three = agents.add("three")
    assert together(ranks(agents, (one, 1), (three, 3)), trains(directory)) == [(4, [0, 1])] * 4
    eventually(lambda: len(names(directory)) == 2, lambda: str(list(directory.iterdir())))
    # Without agents, torchrun reads it.
    two_ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    assert together(two_ranks, lambda: start(directory)) == [(4, [0, 1])] * 2


def load_shards(path: Path) -> None:
    """Load what ranks of a single group load together."""
    stored = Stored(path)
    assert stored.layout is not None
    planner = Planner(stored.layout)
    for index, tensor in enumerate(stored.layout.tensors):
        for piece in planner.pieces(index, Region((0,) * len(tensor.shape), tensor.shape)):
            stored.shard(index, piece)
    for rank in range(planner.parts):
        stored.own(rank)


def no_flipped_bit_is_loaded(path: Path) -> None:
    load_shards(path)
    files = sorted(file for file in path.iterdir() if file.stat().st_size)
    draw = random.Random(7)
    for number in range(100):
        file = files[number % len(files)]
        bit = draw.randrange(8 * file.stat().st_size)
        flip(file, bit)
        for load in (load_shards, lambda path: Stored(path, load=False).check()):
            with pytest.raises(CheckpointError, match="is damaged: "):
                load(path)
        flip(file, bit)
    load_shards(path)


def test_a_node_that_leaves_as_soon_as_it_has_come_takes_no_step_with_it(
    agents: Agents, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = agents.add("one")
    assert together(ranks(agents, (one, 2)), trains(directory, 1, 2)) == [(0, [])] * 2
    two = agents.add("two")
    assert together(ranks(agents, (one, 2), (two, 1)), trains(directory, 3)) == [(2, [0, 1])] * 3
    warm_up(directory, one, two)
    caplog.set_level("INFO", "slurm_elastic")
    with ThreadPoolExecutor() as pool:
        left = pool.submit(agents.leave, "two", 60.0)
        formed = ranks(agents, (one, 2), members_leave=True)
        left.result()
    # The node that is left still holds all of step 2, and of step 3 one part is on disk alone.
    expected = [(3, [0, 1, 2])] * 2
    assert together(formed, trains(directory)) == expected
    assert any("the workers of round 2 start from the checkpoint start-" in line for line in caplog.messages)
    # Again: there was no snapshot in that round.
    assert together(ranks(agents, (one, 2)), trains(directory, 4)) == expected
    assert together(ranks(agents, (one, 2)), trains(directory)) == [(4, [0, 1])] * 2


def test_the_others_join_when_the_node_of_rank_0_has_completed_the_checkpoint_before_it_leaves(
    agents: Agents, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = agents.add("one"), agents.add("two")
    assert together(ranks(agents, (one, 1), (two, 1)), trains(directory, 1, 2)) == [(0, [])] * 2
    warm_up(directory, one, two)
    carry_out, tasks = two._disk._process.carry_out, []

    def record(order: Order, *slots: Slot) -> Outcome:
        tasks.append(order.task)
        return carry_out(order, *slots)

    monkeypatch.setattr(two._disk._process, "carry_out", record)
    writer = one._disk._process._process
    assert isinstance(writer, ForkedProcess)
    os.kill(writer.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        left = pool.submit(agents.leave, "one", 60.0)
        inventory = pool.submit(two.inventory, members_leave=True)
        try:
            eventually(lambda: "look" in tasks, lambda: str(tasks))
            assert not inventory.done()
        finally:
            os.kill(writer.pid, signal.SIGCONT)
        left.result()
        assert inventory.result()
    assert tasks[0] == "part"
    assert names(directory) == ["start-000001.step-000000000002"]
    assert together(ranks(agents, (two, 1), members_leave=True), trains(directory)) == [(2, [0, 1])]


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_agents_whose_workers_were_stopped_at_no_agreed_step_end_with_the_newest_that_all_have(
    ahead: int, agents: Agents, directory: Path
) -> None:
    one, two = agents.add("one"), agents.add("two")

    def work() -> tuple[int, list[int]]:
        return trains(directory, 1, 2, *([3] if int(os.environ["RANK"]) == ahead else []))()

    assert together(ranks(agents, (one, 1), (two, 1)), work) == [(0, [])] * 2
    warm_up(directory, one, two)
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda name: agents.leave(name, 60.0), ("one", "two"))]
    assert names(directory) == ["start-000001.step-000000000002"]
    # Nor is anything left of the step that not all have.
    assert not list(directory.glob(".start-*"))
    assert together(ranks(agents, (agents.add("three"), 1)), trains(directory)) == [(2, [0, 1])]


def by_torch_alone(checkpoint: Path) -> None:
    whole = {f"w{index}": torch.zeros(shape) for index, shape in enumerate(SHAPES)}
    state: dict[str, Any] = {"model": whole, "step": 0}
    load_checkpoint(state, checkpoint_id=checkpoint, no_dist=True)
    assert state["step"] == 3
    for tensor in whole.values():
        assert torch.equal(tensor.flatten(), 3000.0 + torch.arange(tensor.numel()))
    file = checkpoint.parent.parent / "checkpoint.pt"
    dcp_to_torch_save(checkpoint, file)
    state = torch.load(file)
    assert torch.equal(state["moments"]["w1"], torch.tensor([3.0, 4.0]))
    assert [own["rank"] for own in state["per_rank"].values()] == [0, 1, 2]
    assert state["per_rank"]["2"]["noise"].tolist() == [3.0] * 3


@pytest.mark.parametrize("replicates", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_nodes_write_the_same_step_while_they_train(
    replicates: bool,
    fork: Fork,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, stop = tmp_path / "checkpoints", tmp_path / "stop"
    agents = Agents(tmp_path, replicates=replicates, fork=fork)
    nodes = [agents.add(name) for name in ("one", "two", "three")]
    carry_out = nodes[1]._disk._process.carry_out

    def carry_out_slowly(order: Order, *slots: Slot) -> Outcome:
        outcome = carry_out(order, *slots)
        # The others see on disk what it has written, and agree on the next step.
        time.sleep(0.3)
        return outcome

    monkeypatch.setattr(nodes[1]._disk._process, "carry_out", carry_out_slowly)

    def work() -> int:
        start(directory, every=0.0)
        step = 0
        while not stop.exists():
            step += 1
            save(step)
            # One may be a step ahead of another one. The agents have to find a step that all of them keep.
            meet(tmp_path, step, stop.exists)
            time.sleep(0.01)
        return step

    world = (nodes[0], 2), (nodes[1], 1), (nodes[2], 1)
    assert together(ranks(agents, *world), lambda: start(directory)) == [(0, [])] * 4
    warm_up(directory, *nodes)
    store, formed = with_store(ranks(agents, *world))
    workers = [start_worker(each, work) for each in formed]
    seen: set[str] = set()

    def written() -> bool:
        seen.update(names(directory) if directory.exists() else [])
        return len(seen) >= 2

    try:
        eventually(written, lambda: str(list(directory.iterdir())))
    finally:
        stop.touch()
    assert all(result() for result in workers)
    del store
    assert not [message for message in caplog.messages if "has not written its part" in message]
    # Two neighbours: copies are lost with them, too.
    agents.lose("two")
    agents.lose("three")
    formed = ranks(agents, (nodes[0], 1))
    caplog.set_level("INFO", "slurm_elastic")
    started = together(formed, lambda: start(directory))
    # The agent that is left may complete one more of which all parts are on disk, until the next group starts.
    newest = max(seen | set(names(directory)))
    assert started == [(int(newest[-12:]), [0, 1, 2, 3])]
    agents.close()
    assert f"the workers of round 2 start from the checkpoint {newest} of {directory}" in caplog.messages
    assert len([line for line in caplog.messages if line.endswith("; it starts from no snapshot")]) == 1
