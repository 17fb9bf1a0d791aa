"""Nodes that die or fall silent while they train."""

from __future__ import annotations

from typing import Any

from tests.cluster.jobs import SRUN, Job, on


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
    job = jobs.submit("--nodes=4", "elastic.sbatch", "train.py")
    job.wait_for_steps(0, ["n1", "n2", "n3", "n4"])

    jobs.cluster.kill("n3")

    job.wait_for_steps(1, ["n1", "n2", "n4"])
    job.say_enough()
    job.wait_for("COMPLETED")
    assert formed(job) == [(["n1", "n2", "n3", "n4"], "start", 0), (["n1", "n2", "n4"], "node_lost", 0)]
    assert [event["nodes"] for event in job.events("node_lost")] == [["n3"]]
    assert job.exit_code() == 0
    steps = job.steps()
    assert_one_group_at_a_time(steps)
    assert_nothing_is_lost(steps)


def test_a_silent_node_is_given_up_after_the_heartbeat_limit_and_comes_back_when_healed(jobs):
    job = jobs.submit(*on("n1", "n2", "n3"), "elastic.sbatch", "train.py")
    job.wait_for_steps(0, ["n1", "n2", "n3"])

    jobs.cluster.cut("n2")

    job.wait_until("the silent node is not given up", lambda: len(job.rounds()) == 2)
    jobs.cluster.heal("n2")
    job.wait_for_steps(2, ["n1", "n2", "n3"])
    job.say_enough()
    job.wait_for("COMPLETED")
    (lost,) = job.events("node_lost")
    assert (lost["nodes"], lost["why"]) == (["n2"], "silent")
    assert lost["silent_for"] > 3.0
    assert formed(job) == [
        (["n1", "n2", "n3"], "start", 0),
        (["n1", "n3"], "node_lost", 0),
        (["n1", "n2", "n3"], "node_joined", 0),
    ]
    steps = job.steps()
    assert_one_group_at_a_time(steps)


def test_an_agent_that_is_cut_off_for_good_stops_its_workers_and_goes(jobs):
    job = jobs.submit(*on("n1", "n2"), "elastic.sbatch", "--rdzv-conf=leader_limit=4", "train.py")
    job.wait_for_steps(0, ["n1", "n2"])

    jobs.cluster.cut("n2")

    # Still cut: nobody but the agent itself can have done it.
    job.wait_until("its processes go on", lambda: "n2" not in jobs.processes())
    job.wait_for_steps(1, ["n1"])
    # Now srun learns that an agent has ended with 75, which is not what becomes of the job.
    jobs.cluster.heal("n2")
    job.say_enough()
    job.wait_for("COMPLETED")
    assert formed(job) == [(["n1", "n2"], "start", 0), (["n1"], "node_lost", 0)]
    assert_one_group_at_a_time(job.steps())


def test_agents_end_cleanly_when_their_leader_is_gone(jobs):
    jobs.write("job.sh", f"#!/bin/bash\n#SBATCH --no-kill --exclusive\n{SRUN} --output=%N.out bash agent.sh train.py\n")
    job = jobs.submit(*on("n1", "n2", "n3"), "job.sh")
    job.wait_for_steps(0, ["n1", "n2", "n3"])

    jobs.cluster.kill("n1")

    job.wait_until("agents go on", lambda: len(job.exit_codes()) == 2)
    assert job.exit_codes() == {"n2": 75, "n3": 75}
    job.wait_until("something is left", lambda: not jobs.processes())
    # Slurm lets a job run on without the node of its batch script, and with nothing in it.
    jobs.cluster.command(["scancel", str(job.id)])
    job.wait_for("CANCELLED")
