"""Faults that are planted into workers, and what the run makes of them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.agent.job.requeue import read_history
from slurm_elastic.failures.causes import explanation, named
from slurm_elastic.failures.history import find_loops, strikes
from slurm_elastic.rundir import RunDir
from tests import planted_faults
from tests.local.agent.scripts.faults import FAULTS
from tests.local.agents import WORKER, Allocation, agent_command, eventually
from tests.planted_faults import planted

Allocate = Callable[..., Allocation]


def test_the_cause_of_each_planted_fault_is_named(allocate: Allocate) -> None:
    nodes = allocate(2)
    script = Path(__file__).parent / "scripts" / "faults.py"
    agents = nodes.start_all(f"--max-restarts={len(FAULTS)}", "--nnodes=2", script=[str(script)])
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    ends = [event for event in nodes.events() if event["event"] == "round_ended"]
    assert [(end["cause"], end["rank"]) for end in ends] == [(cause, 1) for cause, _ in FAULTS], nodes.log()
    for end in ends:
        row = named(end["cause"])
        known = ("unknown", "unknown") if row is None else (row.domain, row.outlook)
        assert (end["domain"], end["outlook"]) == known
        assert explanation(end["cause"]) in end["text"]
    for number, fault in enumerate(each for each in planted_faults.FAULTS if each.test == planted_faults.EACH_ROUND):
        assert nodes.action(of_round=number) == fault.action, fault.fault


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
    assert nodes.action() == planted("the same exception at the same step twice").action
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
    assert agent.wait() == 75, nodes.log()
    again = allocate(1, restart_count=1)
    agent = again.start(1, "--max-restarts=5", script=["train.py"])
    assert agent.wait() == 1
    assert again.rounds() == 3, again.log()
    agent.expect("the same failure twice in a row, at step 104")
    fault = "the same exception at the same step twice, with a requeue in between"
    assert again.action() == planted(fault).action


LIMITED = """
import os, time
from pathlib import Path

Path("pid.part").write_text(str(os.getpid()))
os.rename("pid.part", "pid." + os.environ["SLURM_ELASTIC_ROUND"])
while not Path("go").exists():
    time.sleep(0.05)
blocks = []
while os.environ["SLURM_ELASTIC_ROUND"] == "0":
    blocks.append(b"x" * (32 << 20))
"""
LIMIT = 1 << 30
MEMORY = Path("/sys/fs/cgroup/memory")


def test_a_worker_over_the_memory_limit_is_told_from_one_that_was_killed(allocate: Allocate) -> None:
    if os.geteuid() != 0 or not MEMORY.is_dir():
        pytest.skip("needs root and the memory controller of control groups, version 1")
    group = Path(tempfile.mkdtemp(prefix="slurm-elastic-test-", dir=MEMORY))
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
        nodes = allocate(1)
        nodes.touch("train.py", LIMITED)
        agent = nodes.start(1, "--max-restarts=1", script=["train.py"])
        (group / "cgroup.procs").write_text(str(agent.pid))
        pid = nodes.directory / "pid.0"
        eventually(pid.exists, nodes.log)
        # The process that starts workers may be older than the limit.
        (group / "cgroup.procs").write_text(pid.read_text())
        nodes.touch("go")
        assert agent.wait() == 0, nodes.log()
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    (end,) = [event for event in nodes.events() if event["event"] == "round_ended"]
    assert (end["cause"], end["domain"], end["outlook"]) == ("host_memory", "user_code", "not_again")
    assert end["text"].count("out of memory on 127.0.0.1") == 1
    assert nodes.action() == planted("a memory limit, of a control group").action


def test_a_node_whose_check_fails_on_every_second_start(allocate: Allocate) -> None:
    nodes = allocate(2)
    alternates = "{ test -e failed && /bin/rm failed; } || { : > failed; exit 1; }"
    check = f"--node-check=test $SLURMD_NODENAME = 127.0.0.1 || {alternates}"
    options = ["--rdzv-conf=last_call_timeout=0.5", check]
    first = nodes.start(1, *options)
    first.expect("round 0 formed")
    assert nodes.start(2, *options).wait() == 1
    second = nodes.start(2, *options)
    nodes.formed(1)
    history = read_history(RunDir.for_run(nodes.directory, nodes.job_id))
    (strike,) = strikes(history)
    assert (strike.node, strike.weight) == ("127.0.0.2", 2)
    # Three more starts like that are a loop.
    now = time.time()
    again = [(time_ + minutes, event) for time_, event in history for minutes in (0, 600, 1200, 1800)]
    assert [loop.nodes for loop in find_loops(again, now + 1800)] == [("127.0.0.2",)]
    nodes.finish(first, second)
    assert nodes.action() == planted("a node whose check fails on every second start").action


def test_a_node_that_does_not_reach_the_leader(allocate: Allocate) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for a network of its own")
    nodes = allocate(3)
    options = ["--nnodes=1:3", "--rdzv-conf=last_call_timeout=0.5"]
    first = nodes.start(1, *options)
    first.expect("round 0 formed")
    # It has begun before the other one has 8 s to reach the leader, and joins within them.
    third = nodes.start(3, *options, "--node-check=: > waits; while ! test -e join; do /bin/sleep 0.05; done")
    eventually((nodes.directory / "waits").exists, nodes.log)
    # A network without any route: its loopback is down.
    cut = ["--local-addr=127.0.0.2", "--nnodes=1:3", "--rdzv-conf=join_timeout=8", str(WORKER)]
    second = nodes.command(2, "/usr/bin/unshare", "--net", *agent_command(*cut))
    second.expect("scontrol show job 7 cannot be started")
    nodes.touch("join")
    first.expect("round 1 formed")
    assert second.wait() == 75
    assert "127.0.0.2 ends: no leader of run 7 on 127.0.0.1: 127.0.0.1:" in second.err
    assert "Network is unreachable, tried for 8 s\n" in second.err
    nodes.finish(first, third)
    assert nodes.action() == planted("a node whose network has no route to the leader").action
    (strike,) = strikes(read_history(RunDir.for_run(nodes.directory, nodes.job_id)))
    assert (strike.node, strike.weight) == ("127.0.0.2", 2)
