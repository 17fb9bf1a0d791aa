"""A user follows a run by commands alone, as an ordinary user and without a look into files."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from tests.cluster.jobs import CHECKOUT, Jobs

ALL = ["n1", "n2", "n3"]
FINISHED, RUNNING = 0, 3


def shown(jobs: Jobs, *words: str) -> tuple[int, str]:
    """Exit code and stdout of ``slurm-elastic WORDS``."""
    done = jobs.ask(*words, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_failure_a_preemption_and_a_kill_are_followed_by_commands_alone(jobs):
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    failing = ("--fail=1", "--fail-times=1")
    options = ("--nnodes=2:3", "--max-restarts=2")
    array = ("--array=0-2", "--exclude=n4", "--time=0")
    job = jobs.submit(*array, "array.sbatch", *options, "train.py", "--asks", *failing)
    run = str(job.id)
    last: dict[str, Any] = {}

    def trains_on(nodes: list[str], **expected: object) -> bool:
        code, text = shown(jobs, "status", run, "--json")
        last.clear()
        last.update(json.loads(text) if text else {})
        training = [agent["node"] for agent in last.get("agents", ()) if agent["state"] == "training"]
        same = all(last.get(name) == value for name, value in expected.items())
        answered = (last.get("live") or {}).get("answered") == len(nodes)
        return code == RUNNING and training == nodes and same and answered and bool(last.get("steps_per_second"))

    def wait_until(nodes: list[str], **expected: object) -> None:
        # Each look by a command costs half a second of a processor.
        jobs.cluster.wait_until(f"{nodes} do not train", lambda: job.trained_on(len(job.tables()) - 1) == nodes)
        jobs.cluster.wait_until(f"status does not show {nodes}, {expected}", lambda: trains_on(nodes, **expected))

    def state_of(node: str) -> str:
        agents = json.loads(shown(jobs, "status", run, "--json")[1])["agents"]
        return next(agent["state"] for agent in agents if agent["node"] == node)

    # A worker has failed, and all have started again.
    wait_until(ALL, restarts=1, restarts_left=1)
    assert "RuntimeError: rank 1 fails as it was told to" in last["root_cause"]["text"]
    assert last["jobs"] is not None
    assert len(last["jobs"]) == 3
    assert last["leader_answers"] is True
    # The list asks no agents, and the first record of progress comes a second after the start of the workers.
    row = rf"^running +{run} +{last['round']} +3 +3 +\d+ +\d+ s ago$"
    jobs.cluster.wait_until("list does not show the run", lambda: re.search(row, shown(jobs, "list")[1], re.MULTILINE))

    # A node is preempted: its element leaves, waits in the queue, and comes back, which costs no step.
    leader, first = last["leader"], last["round"]
    victim = next(node for node in reversed(ALL) if node != leader)
    high = jobs.take(victim)
    wait_until([node for node in ALL if node != victim], reason="node_left")
    # Its agent ends a moment after it has left.
    jobs.cluster.wait_until(f"status does not show that {victim} has ended", lambda: state_of(victim) == "ended")
    high.cancel()
    wait_until(ALL, reason="node_joined")
    assert [place["restarts"] for place in job.rounds()[first:]] == [1] * 3
    steps = [{entry["step"] for entry in job.steps(number)} for number in range(first, first + 3)]
    assert [min(after) - max(before) for before, after in itertools.pairwise(steps)] == [1, 1]

    # A node is killed.
    killed = next(node for node in ALL if node not in (leader, victim))
    jobs.cluster.kill(killed)
    rest = [node for node in ALL if node != killed]
    wait_until(rest, reason="node_lost", restarts=1)
    assert next(agent["state"] for agent in last["agents"] if agent["node"] == killed) == "lost"
    code, text = shown(jobs, "status", run)
    assert code == RUNNING
    assert re.search(rf"^  {killed} +lost ", text, re.MULTILINE), text
    assert re.search(rf"lost {killed}: its (process has ended|connection broke)", text), text

    job.say_enough()
    jobs.cluster.wait_until("status does not show the end", lambda: shown(jobs, "status", run)[0] == FINISHED)
    code, text = shown(jobs, "logs", run, "--errors")
    assert code == 0
    assert re.match(r"round \d+: round \d+ ends: worker failed, n\d", text), text
    assert "root cause: rank 1 on n" in text
    # torch puts the rank before each line of a traceback, unless the worker could not say it any more.
    assert re.search(r"^  (\[rank1\]: )?RuntimeError: rank 1 fails as it was told to$", text, re.MULTILINE), text
    code, text = shown(jobs, "logs", run, "--rank=1", "--grep=RuntimeError: rank 1 fails")
    # Twice, if a node joined in the moment of the failure: a round that ends for that charges no failure.
    assert re.fullmatch(
        r"(\d\d:\d\d:\d\d\.\d{3} \[n\d/1\] .*RuntimeError: rank 1 fails as it was told to\n){1,2}", text
    ), text
    code, text = shown(jobs, "report", run, "--json")
    assert code == 0
    told = json.loads(text)["goodput"]
    assert sum(told["seconds"].values()) == pytest.approx(told["node_seconds"], rel=0.01)
    assert told["seconds"]["productive"] > 0
    assert told["seconds"]["queue"] > 0
    # Steps that were taken again, counted from what the workers themselves have written down. A worker writes a step
    # down before it reports it: the kill may have come between the two in all of them.
    taken = {(entry["round"], entry["step"]) for entry in job.steps()}
    again = len(taken) - len({step for _, step in taken})
    assert told["redone_steps"] in (again, again - 1)
    # The node comes back when Slurm has taken it from its element, not at a moment around SlurmdTimeout.
    state_in_slurm = jobs.cluster.node_state
    jobs.cluster.wait_until(f"Slurm does not give up {killed}", lambda: state_in_slurm(killed).startswith("DOWN"))
    jobs.cluster.start(killed)
    jobs.wait_until_all_ended()
    assert {state for state, _ in jobs.elements(job)} == {"COMPLETED"}
