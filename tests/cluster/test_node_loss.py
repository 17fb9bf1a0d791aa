"""Nodes that die or fall silent while they train."""

from __future__ import annotations

import re
from typing import Any

from tests.cluster.jobs import SILENCE, Job, on
from tests.cluster.testbed import Process
from tests.planted_faults import planted


def formed(job: Job) -> list[tuple[list[str], str, int]]:
    """Nodes, reason and restarts charged of every round."""
    return [
        ([place["node"] for place in round_["places"]], round_["reason"], round_["restarts"]) for round_ in job.rounds()
    ]


def assert_one_group_at_a_time(steps: list[dict[str, Any]]) -> None:
    """No round's worker takes a step when a later round has taken one."""
    rounds = [entry["round"] for entry in steps]
    assert rounds == sorted(rounds)


def assert_nothing_is_lost(steps: list[dict[str, Any]]) -> None:
    """Every round goes on where a checkpoint was taken, which is at most the steps since the last one behind."""
    for number in range(1, max(entry["round"] for entry in steps) + 1):
        before = max(entry["step"] for entry in steps if entry["round"] == number - 1)
        first = min(entry["step"] for entry in steps if entry["round"] == number)
        assert before - 4 < first <= before + 1


def test_a_killed_node_is_left_behind_and_charged_to_nobody(jobs):
    # What is printed is for a user, and not for the other tests.
    del jobs.environ["PET_CONSOLE"]
    job = jobs.submit("--nodes=4", "elastic.sbatch", "train.py", "--asks")
    job.wait_for_steps(0, ["n1", "n2", "n3", "n4"])

    jobs.cluster.kill("n3")

    job.wait_for_steps(1, ["n1", "n2", "n4"])
    told = jobs.ask("drain", job.id, "n4", "--wait").stdout.splitlines()[1]
    assert re.fullmatch(r"n4 drained: all stopped at step \d+, 2 of 3 nodes go on \[round 2 in .*]", told), told
    job.finish()
    assert formed(job) == [
        (["n1", "n2", "n3", "n4"], "start", 0),
        (["n1", "n2", "n4"], "node_lost", 0),
        (["n1", "n2"], "node_left", 0),
    ]
    assert [event["nodes"] for event in job.events("node_lost")] == [["n3"]]
    assert len([line for line in job.lines if line.strip()]) <= 12, job.output
    assert job.exit_code() == 0
    assert job.action() == planted("all processes of a node are killed").action
    steps = job.steps()
    assert_one_group_at_a_time(steps)
    assert_nothing_is_lost(steps)


def workers_on(job: Job, node: str) -> list[Process]:
    """The processes on a node that have taken steps, and are not being ended."""
    pids = {entry["pid"] for entry in job.steps() if entry["node"] == node}
    return [process for process in job.cluster.processes(node) if process.inner_pid in pids]


def test_an_agent_that_is_cut_off_stops_its_workers_and_joins_again_when_healed(jobs):
    job = jobs.submit(*on("n1", "n2"), "elastic.sbatch", SILENCE, "train.py")
    job.wait_for_steps(0, ["n1", "n2"])

    assert len(workers_on(job, "n2")) == 1

    jobs.cluster.cut("n2")

    # Still cut: nobody but the agent itself can have done it.
    job.wait_until("its workers go on", lambda: not workers_on(job, "n2"))
    job.wait_for_steps(1, ["n1"])
    jobs.cluster.heal("n2")
    job.wait_for_steps(2, ["n1", "n2"])
    job.finish()
    (lost,) = [event for event in job.events("node_lost") if event["node"] == "n1"]
    assert (lost["nodes"], lost["why"]) == (["n2"], "silent")
    # In whole milliseconds.
    assert lost["silent_for"] >= 3.0
    assert formed(job) == [(["n1", "n2"], "start", 0), (["n1"], "node_lost", 0), (["n1", "n2"], "node_joined", 0)]
    assert job.action() == planted("a node whose network is cut").action
    assert_one_group_at_a_time(job.steps())
