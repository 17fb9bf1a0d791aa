"""Trainings by frameworks, with the line that loses no step, through preemption, growth, requeue and a killed node."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import FRAMEWORKS, own_environment
from tests.cluster.jobs import CHECKOUT, Job

pytestmark = pytest.mark.nightly

SCRIPTS = CHECKOUT / "benchmarks/scripts"
START = 150.0
"""Seconds that frameworks may take for their imports in four workers at once on two cores."""


@pytest.fixture(scope="module")
def environment() -> Iterator[Path]:
    """In the place of the common one: with training frameworks."""
    if not FRAMEWORKS.exists():
        pytest.fail(f"{FRAMEWORKS} is missing: run `make setup` first", pytrace=False)
    with own_environment(FRAMEWORKS) as programs:
        yield programs


def steps(job: Job) -> dict[int, dict[int, list[int]]]:
    """The numbers of the steps that were taken, by round and rank."""
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for path in job.directory.glob("steps/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if taken := [line["number"] for line in lines if "step" in line]:
            found[lines[0]["round"]][lines[0]["rank"]] = taken
    return found


def reported(job: Job) -> dict[int, dict[int, list[int]]]:
    """The steps that rank 0 has reported, by round."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: {0: []})
    path = job.directory / "out/metrics.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            entry = json.loads(line)
            found[entry["round"]][0].append(entry["step"])
    return found


LOOP = ("--epochs=100000", "--checkpoint-every=100000000", "--checkpoint-dir=out")


@pytest.mark.parametrize(
    ("taken_in", "directory", "training"),
    [
        (steps, SCRIPTS, ("transformers_gpt2.py", "--elastic")),
        (steps, SCRIPTS, ("lightning_layers.py", "--elastic")),
        (reported, CHECKOUT / "docs/examples", ("fabric_loop.py", *LOOP)),
        (reported, CHECKOUT / "docs/examples", ("accelerate_loop.py", *LOOP)),
    ],
    ids=["Transformers", "Lightning", "a loop with Fabric", "a loop with Accelerate"],
)
def test_preemption_return_and_requeue_cost_no_step_and_a_killed_node_one(jobs, taken_in, directory, training):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    jobs.place(directory / training[0])
    jobs.place(SCRIPTS / "marks.py")
    job = jobs.submit("--array=0-2", "array.sbatch", "--nnodes=2:3", *training)

    def trains(world: int, after: int = -1) -> bool:
        """All ranks whose steps are known have taken some in the newest round, which has `world` nodes."""
        taken = taken_in(job)
        newest = max(taken, default=-1)
        if newest <= after or len(job.tables()[newest]) != world:
            return False
        return len(taken[newest]) == world if taken_in is steps else len(taken[newest][0]) > 5

    def wait(complaint: str, world: int, after: int = -1) -> int:
        jobs.cluster.wait_until(complaint, lambda: trains(world, after), START)
        return max(taken_in(job))

    first = wait("three do not train", 3)
    high = jobs.take(next(node for node in reversed(job.tables()[first]) if node != job.leader()))
    second = wait("the others do not go on", 2, first)
    high.cancel()
    third = wait("it does not come back", 3, second)
    jobs.cluster.command(["scontrol", "requeue", str(job.id)])
    fourth = wait("the requeued array does not train", 3, third)
    jobs.cluster.kill(next(node for node in job.tables()[fourth] if node != job.leader()))
    wait("the survivors do not go on", 2, fourth)
    job.cancel()
    jobs.wait_until_all_ended()

    taken = taken_in(job)
    # Elements that start again one by one may train in rounds of two before.
    rounds = sorted(number for number in taken if number >= first)
    for before, after in itertools.pairwise(rounds):
        ends = {numbers[-1] for numbers in taken[before].values()}
        (start,) = {numbers[0] for numbers in taken[after].values()}
        assert after > fourth or len(ends) == 1, f"round {before} ended at {ends}"
        # A rank that is killed may not have reported a step that the others have finished.
        assert max(ends) + 1 - start in ([0] if after <= fourth else [-1, 0, 1]), f"round {after} began at {start}"
    assert {round_["restarts"] for round_ in job.rounds()} == {0}


def test_a_sharded_model_is_resharded_from_four_nodes_to_three_and_back_twice_without_losing_a_step(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    jobs.place(CHECKOUT / "docs/examples/fsdp.py")
    # Shards have no copy on another node: those of the node that leaves are on disk before its agent ends.
    training = ["fsdp.py", "--epochs=1000", "--step-time=0.1", "--snapshots", "--checkpoint-dir=checkpoints"]
    job = jobs.submit("--array=0-3", "array.sbatch", "--nnodes=3:4", *training)

    def begun() -> list[tuple[int, int]]:
        """The step at which each round's training began, and its world size."""
        found = re.findall(r"\] step (\d+): begins with world size (\d+)", job.output)
        return sorted((int(step), int(world)) for step, world in found)

    def trains(*worlds: int) -> bool:
        return tuple(world for _, world in begun())[-len(worlds) :] == worlds and len(job.tables()[-1]) == worlds[-1]

    jobs.cluster.wait_until("four do not train", lambda: trains(4), START)
    victim = next(node for node in reversed(job.tables()[-1]) if node != job.leader())
    high = jobs.take(victim)
    jobs.cluster.wait_until("three do not go on", lambda: trains(4, 3), START)
    high.cancel()
    jobs.cluster.wait_until("the fourth does not come back", lambda: trains(4, 3, 4), START)
    # It has only just come back, and its agent has written nothing yet.
    high = jobs.take(victim)
    jobs.cluster.wait_until("three do not go on again", lambda: trains(4, 3, 4, 3), START)
    names = [path.name for path in job.directory.glob("checkpoints/snapshots/start-*.step-*")]
    high.cancel()
    job.cancel()
    jobs.wait_until_all_ended()

    ended = [event["step"] for event in job.events("round_ended") if event.get("step")]
    starts = [step for step, _ in begun()]
    # Steps are counted anew in each round.
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == ended[: len(starts) - 1]
    assert {round_["restarts"] for round_ in job.rounds()} == {0}
    # When a node joins, memory has all shards; when one leaves, the others begin with what all have written.
    first, joined, second = starts[-3:]
    assert f"start from the snapshot of step {joined}, taken in round" in job.output
    for step in (first, second):
        assert re.search(rf"start from the checkpoint start-\d+\.step-{step:012d} of ", job.output)
    assert max(names).endswith(f"step-{second:012d}")
