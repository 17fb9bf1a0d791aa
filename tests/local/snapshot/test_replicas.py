"""Copies of parts on another node: what a lost node had of its own is not lost with it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic import snapshot
from slurm_elastic.agent.snapshot_feature import SnapshotFeature
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.lineage import read_origin
from slurm_elastic.trainer import StopReason
from tests.local.rendezvous.helpers.parties import Run
from tests.local.snapshot.memories import Agents, in_worker, meet, start_worker
from tests.local.snapshot.test_parts import loads, ranks
from tests.local.waiting import eventually


@pytest.fixture
def silence() -> float:
    return 1.0


@pytest.fixture
def slots() -> int:
    return 3


@pytest.fixture
def agents(tmp_path: Path, slots: int, silence: float) -> Iterator[Agents]:
    made = Agents(tmp_path, replicates=True, slots=slots, silence=silence)
    yield made
    made.close()


def train(agents: Agents, variables: list[dict[str, str]], stop: Path) -> tuple[int, int]:
    """Have all ranks save steps until one is safe on all agents and some more; returns that one, and the last."""

    def work() -> bool:
        rank, step = int(os.environ["RANK"]), 0
        while not stop.exists() or step < int(stop.read_text()):
            step += 1
            own = {"rank": rank, "noise": torch.full((100,), float(step))}
            snapshot.save(step, weight=torch.full((10,), float(step)), per_rank=own)
            meet(stop.parent, step)
            time.sleep(0.01)
        return True

    def safe() -> list[int]:
        found = [agent._replicator.safe for agent in agents.all()]
        return [each.step for each in found if each is not None]

    workers = [start_worker(each, work) for each in variables]
    try:
        eventually(lambda: len(safe()) == len(agents.all()), lambda: f"nothing is safe: {safe()}")
        known = min(safe())
    finally:
        # Ahead of all ranks, which then end after the same step.
        last = max(safe(), default=0) + 200
        (stop.parent / "writing").write_text(str(last))
        (stop.parent / "writing").rename(stop)
    assert all(result() for result in workers)
    return known, last


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("silence", [20.0])
def test_a_lost_node_costs_the_steps_since_the_last_copy(agents: Agents, tmp_path: Path, silence: float) -> None:
    one, two, three = (agents.add(name) for name in ("one", "two", "three"))
    safe, last = train(agents, ranks(agents, (one, 2), (two, 1), (three, 1)), tmp_path / "stop")
    held, step = one.held()
    # Its own and the replicas of another rank: tensors, descriptions and what rounds them up.
    assert held > 8 * 400
    assert step is not None
    assert step >= safe
    agents.lose("two")
    began = time.monotonic()
    formed = ranks(agents, (one, 1), (three, 1))
    # It is not waited for what the lost node does not send.
    assert time.monotonic() - began < silence / 2
    for variables in formed:
        weight, own = in_worker(variables, loads)
        # What came after it is whole on the nodes that are left, but not on the lost one.
        assert safe < weight <= last
        assert own == [(rank, weight, 100) for rank in range(4)]


@pytest.mark.parametrize("silence", [20.0])
def test_nothing_is_awaited_when_no_agent_leaves(agents: Agents, tmp_path: Path, silence: float) -> None:
    one, two, three = (agents.add(name) for name in ("one", "two", "three"))
    train(agents, ranks(agents, (one, 1), (two, 1), (three, 1)), tmp_path / "stop")
    agents.lose("two")
    # The third, which sends its copies to the first, says nothing.
    began = time.monotonic()
    assert one.inventory(members_leave=False)
    assert time.monotonic() - began < silence / 10


def test_the_memory_is_told_whether_agents_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool | None] = []

    def inventory(memory: AgentMemory, *arguments: Any, members_leave: bool | None) -> str:
        told.append(members_leave)
        return ""

    monkeypatch.setattr(AgentMemory, "inventory", inventory)
    run = Run(tmp_path)
    for reason in (StopReason.NODE_JOINED, StopReason.PREEMPTED, None):
        directory = tmp_path / str(reason)
        directory.mkdir()
        feature = SnapshotFeature(run.config, directory, lambda: False)
        if reason is not None:
            feature.stop_agreed(reason)
        feature.exits_expected(unplanned=False)
        feature.inventory()
        feature.exits_expected(unplanned=True)
        feature.inventory()
        feature.run_ended()
    run.close()
    assert told == [False, False, True, False, None, False]


def test_what_was_safe_before_a_node_joined_outlives_a_loss_after_it(agents: Agents, tmp_path: Path) -> None:
    one, two, three = (agents.add(name) for name in ("one", "two", "three"))
    safe, last = train(agents, ranks(agents, (one, 1), (two, 1), (three, 1)), tmp_path / "stop")
    four = agents.add("four")
    formed = ranks(agents, (one, 1), (two, 1), (three, 1), (four, 1), members_leave=False)
    origin = read_origin(agents.origin)
    assert origin.copy is not None
    assert origin.copy.id.step == last
    assert origin.safe is not None
    assert safe <= origin.safe.step

    def saves() -> None:
        rank = int(os.environ["RANK"])
        for step in range(last + 1, last + 4):
            own = {"rank": rank, "noise": torch.full((100,), float(step))}
            snapshot.save(step, weight=torch.full((10,), float(step)), per_rank=own)
            # As the all-reduce of a step: no rank overwrites what the joined one has still to get.
            meet(tmp_path, step)

    for result in [start_worker(each, saves) for each in formed]:
        result()
    agents.lose("two")
    for variables in ranks(agents, (one, 1), (three, 1), (four, 1), members_leave=False):
        weight, own = in_worker(variables, loads)
        assert weight >= origin.safe.step
        assert own == [(rank, weight, 100) for rank in range(len(own))]


def test_an_agent_that_leaves_costs_no_step(agents: Agents, tmp_path: Path) -> None:
    one, two, three = (agents.add(name) for name in ("one", "two", "three"))
    _, last = train(agents, ranks(agents, (one, 1), (two, 1), (three, 2)), tmp_path / "stop")
    with ThreadPoolExecutor() as pool:
        left = pool.submit(agents.leave, "two", 5.0)
        formed = ranks(agents, (three, 1), (one, 1))
        left.result()
    for variables in formed:
        assert in_worker(variables, loads) == (last, [(rank, last, 100) for rank in range(4)])


def test_two_neighbours_lost_at_once_are_two_too_many(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [agents.add(name) for name in ("one", "two", "three")]
    train(agents, ranks(agents, *((node, 1) for node in nodes)), tmp_path / "stop")
    agents.lose("two")
    agents.lose("three")
    assert in_worker(ranks(agents, (nodes[0], 1))[0], loads) == (0.0, [])
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert re.search("no agent that is left holds part 1.* lost with their node and that of its copies; it", lines[0])
