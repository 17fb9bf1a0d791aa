"""Faults that are planted into workers, and what the run makes of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

from slurm_elastic.failures import explanation, named
from tests.local.agent.faults import FAULTS
from tests.local.agents import Allocation

Allocate = Callable[..., Allocation]


def test_the_cause_of_each_planted_fault_is_named(allocate: Allocate) -> None:
    nodes = allocate(2)
    script = Path(__file__).with_name("faults.py")
    agents = nodes.start_all(f"--max-restarts={len(FAULTS)}", "--nnodes=2", script=[str(script)])
    assert [agent.wait() for agent in agents] == [0, 0], nodes.story()
    ends = [event for event in nodes.events() if event["event"] == "round_ended"]
    assert [(end["cause"], end["rank"]) for end in ends] == [(cause, 1) for cause, _ in FAULTS], nodes.story()
    for end in ends:
        row = named(end["cause"])
        known = ("unknown", "unknown") if row is None else (row.domain.value, row.outlook.value)
        assert (end["domain"], end["outlook"]) == known
        assert explanation(end["cause"]) in end["text"]
    (record,) = (nodes.run_dir / "rounds").glob(f"{len(FAULTS):06d}.json")
    assert json.loads(record.read_text())["restarts"] == len(FAULTS)


REPEATS = """
import os, time
from slurm_elastic import trainer

if os.environ["SLURM_ELASTIC_ROUND"] != os.environ.get("WAITS_IN_ROUND"):
    for step in range(100, 105):
        trainer.should_stop(step)
    raise ValueError(f"sample {os.getpid()} is bad")
while not trainer.should_stop(104):
    time.sleep(0.05)
"""


def test_the_same_failure_twice_in_a_row_ends_the_run(allocate: Allocate) -> None:
    nodes = allocate(1)
    nodes.touch("train.py", REPEATS)
    agent = nodes.start(1, "--max-restarts=5", script=["train.py"])
    assert agent.wait() == 1
    assert nodes.rounds() == 2
    agent.expect("the run failed: the same failure twice in a row, at step 104 (--stop-on-same-failure off restarts")
    assert "is bad" in agent.err.partition("rank 0 on 127.0.0.1 ended with exit code 1")[2], "the root cause is last"
    # A second time for the same reason, by another run of the same job.
    (record,) = (nodes.run_dir / "rounds").glob("000001.json")
    assert json.loads(record.read_text())["last_failure"].endswith("| at step 104")
    agent = nodes.start(1, "--max-restarts=2", "--run-id=8", "--stop-on-same-failure=off", script=["train.py"])
    assert agent.wait() == 1
    assert len(list((nodes.run_dir.parent / "8" / "rounds").glob("*.json"))) == 3
    assert "twice in a row" not in agent.err


def test_a_requeued_job_knows_the_last_failure(allocate: Allocate) -> None:
    nodes = allocate(1)
    nodes.touch("train.py", REPEATS)
    agent = nodes.start(1, "--max-restarts=5", script=["train.py"], WAITS_IN_ROUND="1")
    agent.expect("round 1 formed after worker failed")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75, nodes.story()
    again = allocate(1, restart_count=1)
    agent = again.start(1, "--max-restarts=5", script=["train.py"])
    assert agent.wait() == 1
    assert again.rounds() == 3, again.story()
    agent.expect("the same failure twice in a row, at step 104")


def test_a_node_that_fails_its_check_does_not_join(allocate: Allocate) -> None:
    nodes = allocate(2)
    options = ["--rdzv-conf=last_call_timeout=0.5", '--node-check=echo "no fan in $SLURMD_NODENAME"; test -e sound']
    nodes.touch("sound")
    first = nodes.start(1, *options)
    first.expect("round 0 formed")
    (nodes.directory / "sound").unlink()
    second = nodes.start(2, *options, '--on-bad-node=echo "$SLURM_ELASTIC_BAD_NODE_REASON" > drained')
    assert second.wait() == 1
    why = "--node-check ended with exit code 1: no fan in 127.0.0.2"
    assert f"error: 127.0.0.2 does not join the run, as it failed its check: {why}\n" in second.err
    assert (nodes.directory / "drained").read_text() == f"{why}\n"
    (event,) = [event for event in nodes.events() if event["event"] == "node_check_failed"]
    assert (event["nodes"], event["why"]) == (["127.0.0.2"], why)
    nodes.touch("finish")
    assert first.wait() == 0
    assert nodes.rounds() == 1
