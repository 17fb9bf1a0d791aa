"""Snapshots that become checkpoints on disk, and groups that start from them."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load as load_checkpoint

from slurm_elastic import snapshot
from slurm_elastic.cli import main
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.disk.checkpoints import Checkpoints, SupersededError
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.writer import Order, Outcome
from slurm_elastic.snapshot.hand_over import Directory
from slurm_elastic.snapshot.memory import Slot
from tests.local.snapshot.memories import Agents, Fork, in_worker, raised_by, together
from tests.local.waiting import eventually

ROOT = Path(__file__).parents[3]
WRITES = True


def trains(directory: Path, *steps: int, every: float = 600.0) -> Any:
    """Work that takes snapshots of these steps; it returns the step and the weight that it started from."""

    def work() -> tuple[int, float]:
        snapshot.to_disk(directory, every=every)
        weight, pair, step = snapshot.load(weight=torch.zeros(3), pair=(0, torch.zeros(1)), step=0)
        for each in steps:
            state = torch.full((3,), float(each))
            snapshot.save(each, weight=state, pair=(each, state[:1]), step=each)
        assert weight[0] == pair[1][0] == step == pair[0]
        return step, float(weight[0])

    return work


def end(agent: AgentMemory) -> None:
    """The agent ends after a round."""
    agent.inventory()
    agent.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))


def test_an_agent_that_ends_leaves_its_newest_snapshot_for_later_runs_and_for_torch(
    agents: Agents, fork: Fork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slurm_elastic")
    directory = tmp_path / "made" / "checkpoints"
    one = agents.add("one")
    assert agents.alone(one, trains(directory, 1, 2, 3)) == (0, 0.0)
    end(one)
    assert names(directory) == ["start-000001.step-000000000003"]
    # By torch alone, as the documentation says.
    found = {"weight": torch.zeros(3), "step": 0}
    load_checkpoint(found, checkpoint_id=directory / "start-000001.step-000000000003", no_dist=True)
    assert found["weight"].tolist() == [3.0] * 3
    assert found["step"] == 3
    # A later run has nothing in memory.
    later = Agents(tmp_path, fork=fork)
    two = later.add("two")
    assert later.alone(two, trains(directory, 4)) == (3, 3.0)
    name = "start-000001.step-000000000003"
    assert f"the workers of round 0 start from the checkpoint {name} of {directory}" in caplog.messages
    # Memory goes first, and what it holds is on the line.
    assert later.alone(two, trains(directory)) == (4, 4.0)
    assert sum("from the checkpoint" in message for message in caplog.messages) == 1
    # That is written at once.
    eventually(lambda: len(names(directory)) == 2, lambda: str(names(directory)))
    later.close()
    assert names(directory) == ["start-000001.step-000000000003", "start-000002.step-000000000004"]


def test_checkpoints_are_taken_beside_the_training_and_old_ones_go(
    agents: Agents, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = agents.add("one")
    carry_out = one._disk._process.carry_out

    def carry_out_slowly(order: Order, *slots: Slot) -> Outcome:
        outcome = carry_out(order, *slots)
        # Workers take many steps meanwhile.
        time.sleep(0.2)
        return outcome

    monkeypatch.setattr(one._disk._process, "carry_out", carry_out_slowly)

    def work() -> list[str]:
        snapshot.to_disk(directory, every=0)
        snapshot.load(weight=None)
        seen: list[str] = []
        step = 0

        def taken() -> bool:
            nonlocal step
            step += 1
            snapshot.save(step, weight=torch.full((1000,), float(step)))
            seen.extend(name for name in names(directory) if name not in seen)
            return len(seen) >= 4

        eventually(taken, lambda: str(seen))
        return seen

    seen = agents.alone(one, work)
    end(one)
    assert seen == sorted(seen)
    there = names(directory)
    assert len(there) == 2
    for name in there:
        found = Checkpoints(directory).read(CheckpointId(1, int(name[-12:])))
        # Never a mixture of steps, though workers overwrite slots all the time.
        assert set(found.tensors[0].tolist()) == {float(name[-12:])}


def test_a_checkpoint_is_due_after_so_many_steps_of_a_run_that_goes_on(agents: Agents, directory: Path) -> None:

    def work() -> list[str]:
        snapshot.to_disk(directory, every_steps=2)
        snapshot.load(step=0)
        snapshot.save(1, step=1)
        snapshot.save(2, step=2)
        eventually(lambda: names(directory) != [])
        return names(directory)

    one = agents.add("one")
    assert agents.alone(one, work) == ["start-000001.step-000000000002"]


def test_a_group_that_was_cut_off_replaces_nothing(agents: Agents, directory: Path) -> None:
    one, two = agents.add("one"), agents.add("two")
    first, _ = agents.next_round([one, two])
    assert in_worker(first, trains(directory, 1, 2)) == (0, 0.0)
    # Round 1 is formed without the first node, from another's snapshot; that node goes on.
    assert in_worker({**first, "RANK": "1", "WORLD_SIZE": "1"}, trains(directory, 1)) is None
    checkpoints = Checkpoints(directory)
    start, _ = checkpoints.start("7", 1, None, None)
    assert start.line == ()
    with pytest.raises(SupersededError, match=r"start 2 has taken over .*, from a state without step 2"):
        checkpoints.publish(CheckpointId(1, 2), 1, lambda path: True, 2)
    end(one)
    assert names(directory) == []


def test_a_checkpoint_that_cannot_be_written_is_one_line(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = agents.add("one")

    def work() -> bool:
        snapshot.to_disk(tmp_path / "checkpoints")
        snapshot.load(state=None)
        # These have the same name for torch.distributed.checkpoint.
        snapshot.save(7, state={1: torch.zeros(1), "1": torch.zeros(1)})
        return True

    assert agents.alone(one, work)
    end(one)
    assert (
        f"the snapshot of step 7 cannot be written to {tmp_path / 'checkpoints'}: ValueError: duplicated" in caplog.text
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["start-000001.json"]


def test_a_writer_that_is_killed_at_the_end_is_started_once_more(agents: Agents, directory: Path) -> None:
    one = agents.add("one")
    agents.alone(one, trains(directory, 3))
    one.inventory()
    one._disk._process.carry_out(Order(Directory(str(directory), 0.0, 1, 9), CheckpointId(9, 9), "discard"))
    assert one._disk._process._process is not None
    one._disk._process._process.kill()
    assert one.close() == ""
    assert names(directory) == ["start-000001.step-000000000003"]


def test_an_end_without_the_newest_checkpoint_says_why(agents: Agents, directory: Path) -> None:
    one = agents.add("one")
    agents.alone(one, trains(directory, 3))
    one.inventory()
    shutil.rmtree(directory)
    directory.touch()
    assert "Not a directory" in one.close()


def test_a_start_that_is_superseded_while_it_is_recorded_is_withdrawn(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    answers = iter([True, False])
    with pytest.raises(SupersededError, match="a newer round has started"):
        checkpoints.start("7", 1, None, None, lambda: next(answers))
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.start("7", 2, None, None)[0].number == 1


def test_a_checkpoint_that_cannot_be_read_ends_the_worker(agents: Agents, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.start("7", 0, None, None)

    raised = raised_by(trains(checkpoints.path))
    path = checkpoints.path_of(CheckpointId(1, 5))
    path.mkdir()
    for content, message in [
        (b'{"version":3}', "has version 3 of snapshot.json, not 2; load it with torch.distributed.checkpoint"),
        (b'{"version":1,"state":{},"tensors":[["../secret",0,1]]}', "../secret is no name of a file"),
        (b"{", "all checkpoints of "),
    ]:
        (path / "snapshot.json").write_bytes(content)
        assert message in agents.alone(agents.add(str(len(message))), raised)
        # It is set aside then, and nothing starts from the beginning without a word.
    assert "start-000001.step-000000000005.damaged; restore one" in agents.alone(agents.add("again"), raised)
    (checkpoints.path / "start-000009.json").write_text("{}")
    found = agents.alone(agents.add("last"), raised)
    assert "start-000009.json is no record of a start" in found


def written(agents: Agents, directory: Path, *steps: int) -> None:
    """The directory has a checkpoint of each of these steps."""
    for step in steps:
        agent = agents.add(f"writes{step}")
        agents.alone(agent, trains(directory, step))
        end(agent)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_the_checkpoint_before_a_damaged_one_is_taken(
    agents: Agents, tmp_path: Path, directory: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    written(agents, directory, 3, 5)
    first, second = names(directory)
    assert main(["checkpoints", str(directory)]) == 0
    assert capfd.readouterr().out.count("whole") == 2
    flip(directory / second / "__0_0.distcp", 999)
    assert main(["checkpoints", str(directory)]) == 1
    assert "is damaged: __0_0.distcp has a wrong digest" in capfd.readouterr().out
    _, chosen = Checkpoints(directory).start("8", 0, None, None)
    assert chosen == CheckpointId(1, 3)
    assert f"it is set aside as {second}.damaged, and the one before it counts" in caplog.text
    later = Agents(tmp_path)
    assert later.alone(later.add("later"), trains(directory)) == (3, 3.0)
    later.close()
    assert names(directory) == [first, f"{second}.damaged"]


def test_a_checkpoint_of_an_earlier_release_is_loaded_unchecked(
    agents: Agents, directory: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    written(agents, directory, 3)
    description = directory / names(directory)[0] / "snapshot.json"
    content = json.loads(description.read_text())
    for name in ("digest", "records", "pieces"):
        del content[name]
    description.write_text(json.dumps(content))
    checkpoints = Checkpoints(directory)
    _, chosen = checkpoints.start("8", 0, None, None)
    assert chosen == CheckpointId(1, 3)
    assert set(checkpoints.read(chosen).tensors[0].tolist()) == {3.0}
    assert caplog.text.count("has no digests: it is loaded unchecked") == 1
    assert main(["checkpoints", str(directory)]) == 0
    assert "unknown: of an earlier release" in capfd.readouterr().out


def test_order_of_calls(agents: Agents, tmp_path: Path) -> None:
    def work() -> list[str]:
        snapshot.to_disk(tmp_path / "a")
        calls = (
            lambda: snapshot.save(1, step=1),
            lambda: snapshot.load(step=1),
            lambda: snapshot.to_disk(tmp_path / "b"),
            lambda: snapshot.to_disk(tmp_path / "b", keep=0),
        )
        return [raised_by(call)() for call in calls]

    assert agents.alone(agents.add("one"), work) == [
        "snapshot.save comes before snapshot.load: after snapshot.to_disk call load first",
        "",
        "snapshot.to_disk comes too late: call it before snapshot.load",
        "every=600.0, keep=0: checkpoints need 0 seconds or more, and one at least that stays",
    ]


SCRIPT = """
import os, torch
from slurm_elastic import snapshot
snapshot.to_disk("checkpoints", keep=1)
for _ in range(2):  # The second one changes nothing.
    weight, step = snapshot.load(weight=torch.zeros(2), step=0)
started = step, weight.tolist()
for step in range(step + 1, step + 4):
    snapshot.save(step, weight=torch.full((2,), float(step)), step=step)
"""


def test_without_an_agent_the_script_reads_and_writes_checkpoints_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    assert names(tmp_path / "checkpoints") == ["start-000001.step-000000000003"]

    def work() -> tuple[int, list[float]]:
        # Those of the process that tests are not for this one.
        atexit._clear()
        os.chdir(tmp_path)
        started: tuple[int, list[float]] = runpy.run_path("train.py")["started"]
        atexit._run_exitfuncs()
        return started

    # As torchrun tells them.
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in (0, 1)]
    assert together(ranks, work) == [(3, [3.0, 3.0])] * 2
    assert names(tmp_path / "checkpoints") == ["start-000002.step-000000000006"]


def test_a_writer_that_is_slow_is_left_at_the_deadline(
    agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = agents.add("one")
    assert agents.alone(one, trains(tmp_path / "checkpoints", 1)) == (0, 0.0)
    one.inventory()
    began = time.monotonic()
    one.close(until=began)
    assert "the newest snapshot is not on disk: the time is over" in caplog.text
    assert names(tmp_path / "checkpoints") == []
