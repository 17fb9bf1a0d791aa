"""Agents that hold snapshots: nothing that is lost costs more than one step, without any checkpoint on disk."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.local.agent.test_health import ask, target
from tests.local.agent.test_winding import STEPPING, stepped, steps
from tests.local.agents import WARM, Allocation, eventually

Allocate = Callable[..., Allocation]


def training(nodes: Allocation, *arguments: str) -> list[Any]:
    """Agents on all nodes, whose workers have taken some steps and as many snapshots."""
    nodes.touch("pace", "0.01")
    agents = nodes.start_all(WARM, "--nnodes=1:3", *arguments, script=(STEPPING, "snapshots"))
    stepped(nodes, 0, 5)
    return agents


def repeated(nodes: Allocation, round_: int) -> int:
    """How many steps all ranks that take part in a round take again; all start from the same one."""
    world = json.loads((nodes.run_dir / "rounds" / f"{round_:06d}.json").read_text())["world_size"]
    taken = [steps(nodes, rank) for rank in range(nodes.size)]
    first = {min(step for number, step, _ in taken[rank] if number == round_) for rank in range(world)}
    before = max(step for ranks in taken for number, step, _ in ranks if number < round_)
    assert len(first) == 1, nodes.log()
    return before - first.pop() + 1


def test_nodes_that_hold_two_snapshots_need_a_third_less_and_lose_no_more(allocate: Allocate) -> None:
    nodes = allocate(2, job_id="19")
    nodes.touch("pace", "0.01")
    words = (WARM, "--nnodes=1:3", "--max-restarts=1")
    agents = [
        nodes.start(number, *words, f"--snapshot-slots={slots}", script=(STEPPING, "snapshots", "own"))
        for number, slots in ((1, 2), (2, 3))
    ]
    stepped(nodes, 0, 5)
    assert held_by(nodes, 1) == held_by(nodes, 2) * 2 / 3 > 0
    os.kill(int((nodes.directory / "pid.1").read_text()), signal.SIGKILL)
    stepped(nodes, 1)
    nodes.finish(*agents)
    assert repeated(nodes, 1) in (0, 1)
    assert "the workers of round 1 start from the snapshot of step " in agents[0].err


def held_by(nodes: Allocation, number: int) -> float:
    """The memory that a node holds for snapshots, in bytes, by its health port."""
    page = ask(target(nodes, number), "/metrics")[1]
    (line,) = re.findall(r"^slurm_elastic_snapshot_bytes\{.*\} (.*)$", page, re.MULTILINE)
    return float(line)


def test_nodes_go_on_without_the_leader_and_a_new_one_gets_the_snapshot(allocate: Allocate) -> None:
    nodes = allocate(3, job_id="19")
    agents = training(nodes)
    agents[0].kill()
    stepped(nodes, 1)
    assert repeated(nodes, 1) in (0, 1)
    # The node is back, and has nothing in memory.
    agents[0] = nodes.start(1, WARM, "--nnodes=1:3", script=(STEPPING, "snapshots"))
    eventually(lambda: nodes.rounds() > 2, nodes.log)
    stepped(nodes, 2)
    nodes.finish(*agents)
    assert repeated(nodes, 2) == 0


def test_a_state_from_which_workers_fail_is_left_for_older_ones_and_then_for_disk(allocate: Allocate) -> None:
    nodes = allocate(1, job_id="19")
    nodes.touch("poison", "3")
    nodes.touch("pace", "0.01")
    agent = nodes.start(1, WARM, "--max-restarts=4", script=(STEPPING, "snapshots"))
    stepped(nodes, 4)
    nodes.finish(agent)
    resumed = [int(line.split()[-1]) for line in agent.out.splitlines() if "resumed at" in line]
    assert resumed == [0, 6, 5, 4, 0], nodes.log()
    assert "failed before the next snapshot; it starts from no snapshot" in agent.err


def test_a_job_that_is_leaving_starts_again_from_what_its_agent_wrote_to_disk(allocate: Allocate) -> None:
    nodes = allocate(1, job_id="19")
    nodes.touch("pace", "0.01")
    agent = nodes.start(1, script=(STEPPING, "snapshots", "disk"))
    # The process that writes has imported torch.
    agent.expect("is on disk: ")
    agent.signal(signal.SIGTERM)
    agent.wait()
    last = max(step for _, step, _ in steps(nodes, 0))
    assert f"step {last} is on disk: " in agent.err
    # Requeued: no agent has anything in memory.
    again = allocate(1, job_id="19", restart_count=1)
    agent = again.start(1, script=(STEPPING, "snapshots", "disk"))
    stepped(again, 1)
    again.finish(agent)
    assert repeated(again, 1) == 0


_LOSES_ITS_DISK = """
import os, pathlib, shutil
from slurm_elastic import snapshot
snapshot.to_disk("checkpoints")
snapshot.load(step=0)
snapshot.save(1, step=1)
shutil.rmtree("checkpoints")
pathlib.Path("checkpoints").touch()
"""


def test_a_finished_run_whose_last_checkpoint_is_not_on_disk_ends_with_1(allocate: Allocate, tmp_path: Path) -> None:
    nodes = allocate(1, job_id="19")
    script = tmp_path / "train.py"
    script.write_text(_LOSES_ITS_DISK)
    agent = nodes.start(1, script=(str(script),))
    assert agent.wait() == 1, nodes.log()
    assert "the run is finished, and its last checkpoint is not on disk: " in agent.err.splitlines()[-1]
    assert (nodes.run_dir / "done.json").exists()
