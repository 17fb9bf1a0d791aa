"""Agents that die, stop or fall silent."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.local.agents import WORKER, Allocation, agent_command, eventually
from tests.local.waiting import is_there

Allocate = Callable[..., Allocation]

QUICK = "--rdzv-conf=heartbeat_limit=1"


def test_a_killed_agent_is_replaced_by_a_spare_and_leaves_no_worker(allocate: Allocate) -> None:
    nodes = allocate(4)
    agents = nodes.start_led("--nnodes=1:3", nodes=3)
    before = nodes.seen(0)
    agents.append(nodes.start(4, "--nnodes=1:3"))
    agents[3].expect("waits as a spare")
    agents[1].kill()
    assert nodes.nodes_of(1) == ["127.0.0.1", "127.0.0.3", "127.0.0.4"]
    after = nodes.seen(1)
    env = after[0]["env"]
    assert (env["SLURM_ELASTIC_REASON"], env["TORCHELASTIC_RESTART_COUNT"]) == ("node_lost", "0")
    nodes.touch("finish")
    assert [agents[index].wait() for index in (0, 2, 3)] == [0, 0, 0]
    # Its workers did not outlive it either.
    eventually(lambda: not nodes.processes(), lambda: str(nodes.processes()))
    assert {before[rank]["env"]["MASTER_PORT"] for rank in before} != {env["MASTER_PORT"]}
    lost = [event for event in nodes.events() if event["event"] == "node_lost"]
    assert [event["nodes"] for event in lost] == [["127.0.0.2"]]
    # Where the answer of its node takes longer than a broken connection may, that is the reason.
    assert lost[0]["why"] in ("its process has ended", "its connection broke")


def test_a_leader_paused_for_long_is_followed_and_joins_its_successor_when_it_goes_on(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_all(f"{QUICK},last_call_timeout=5")
    seen = nodes.seen(0)
    # With so short a limit another one may have led at first, on a busy machine.
    leader = nodes.nodes.index(nodes.leader())
    agents[leader].signal(signal.SIGSTOP)
    followed = nodes.comes_to([*nodes.nodes[:leader], *nodes.nodes[leader + 1 :]], after=0)
    env = nodes.seen(followed)[0]["env"]
    assert env["SLURM_ELASTIC_REASON"] == "node_lost"
    # An epoch may be claimed in vain.
    assert int(env["SLURM_ELASTIC_EPOCH"]) > int(seen[leader]["env"]["SLURM_ELASTIC_EPOCH"])
    agents[leader].signal(signal.SIGCONT)
    nodes.comes_to(nodes.nodes, after=followed)
    assert not is_there(seen[leader])
    nodes.finish(*agents)


_FAILS_WITH_ITS_PEER = """
import pathlib, os, signal, sys, time
round_, rank = os.environ["SLURM_ELASTIC_ROUND"], os.environ["RANK"]
def end(number, frame):
    pathlib.Path("ending").touch()
    time.sleep(2.0)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path("there." + rank).touch()
while not pathlib.Path("finish").exists():
    time.sleep(0.01)
    if round_ == rank == "0" and pathlib.Path("ending").exists():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.2]:4711")
"""


def test_what_fails_because_a_member_was_cut_off_is_not_charged(allocate: Allocate) -> None:
    nodes = allocate(2)
    nodes.touch("train.py", _FAILS_WITH_ITS_PEER)
    leader, member = nodes.start_led("--nnodes=2", "--rdzv-conf=heartbeat_limit=3", script=["train.py"])
    eventually(lambda: len(list(nodes.directory.glob("there.*"))) == 2, nodes.log)
    leader.signal(signal.SIGSTOP)
    # Its worker, which it stops, is missed by that of the leader's node at once, and ends 2 s later.
    eventually((nodes.directory / "ending").exists, nodes.log)
    leader.signal(signal.SIGCONT)
    eventually(lambda: nodes.rounds() == 2, nodes.log)
    nodes.finish(leader, member)
    formed = [event for event in nodes.events() if event["event"] == "round_formed"]
    assert [(event["reason"], event["restarts"]) for event in formed] == [("start", 0), ("node_lost", 0)]


_SLOW_TO_PUBLISH = """
import os, pathlib, signal, sys, time
from slurm_elastic import trainer
def publish(number, frame):
    answer = pathlib.Path("answer." + os.environ["RANK"])
    answer.with_suffix(".part").write_text(str(trainer.may_publish()))
    answer.with_suffix(".part").rename(answer)
    sys.exit(0)
signal.signal(signal.SIGTERM, publish)
pathlib.Path("ready." + os.environ["RANK"]).touch()
time.sleep(300)
"""


def test_a_worker_that_is_cut_off_may_not_publish_though_nobody_has_followed_yet(allocate: Allocate) -> None:
    nodes = allocate(2)
    script = nodes.directory / "slow_to_publish.py"
    script.write_text(_SLOW_TO_PUBLISH)
    # So that nobody counts as lost who waits for a processor before the leader is paused.
    limit = "--rdzv-conf=heartbeat_limit=3"
    leader = nodes.start(1, limit, script=[str(script)])
    eventually(nodes.is_led, nodes.log)
    # Workers of a broken group get half a second, in which one that has to wait for a processor may not come to answer.
    patient = {"slurm_elastic.agent.lifecycle.machine.UNPLANNED_STOP_TIMEOUT": 60.0}
    member = nodes.start(2, limit, script=[str(script)], constants=patient)
    eventually(lambda: len(list(nodes.directory.glob("ready.*"))) == 2)
    leader.signal(signal.SIGSTOP)
    answer = nodes.directory / "answer.1"
    eventually(answer.exists)
    # The records tell of no newer leader, and of two the one that does not lead cannot follow.
    assert answer.read_text() == "False"
    assert len(list(nodes.run_dir.glob("epochs/*/*.json"))) == 1
    leader.signal(signal.SIGTERM)
    leader.signal(signal.SIGCONT)
    member.signal(signal.SIGTERM)
    assert [leader.wait(), member.wait()] == [75, 75]


def test_what_a_worker_leaves_behind_is_gone_in_the_next_round_and_at_the_end(allocate: Allocate) -> None:
    nodes = allocate(2)
    nodes.touch("leave-child")
    agents = nodes.start_all("--nproc-per-node=2", "--max-restarts=1")
    seen = nodes.seen(0)
    # Just executed, it may not show its command line yet.
    eventually(lambda: len(nodes.processes("/bin/sleep")) == 4, nodes.log)
    left = nodes.processes("/bin/sleep").keys()
    nodes.touch("fail.0.1", "3")
    nodes.seen(1)
    assert not left & nodes.processes("/bin/sleep").keys()
    assert not any(is_there(record) for record in seen.values())
    # Workers that end well leave their children behind, too.
    eventually(lambda: len(nodes.processes("/bin/sleep")) == 4, nodes.log)
    nodes.finish(*agents)
    assert not nodes.processes()


def test_a_hard_limit_on_open_files_that_is_too_low_to_lead_is_said_before_anybody_trains(allocate: Allocate) -> None:
    nodes = allocate(1000)
    limited = ("/bin/bash", "-c", 'ulimit -n 1000 && exec "$@"', "bash")
    # Also the one that does not lead at first.
    agent = nodes.command(2, *limited, *agent_command("--local-addr=127.0.0.2", str(WORKER)))
    assert agent.wait() == 2
    line = (
        "slurm-elastic: error: the limit on open files is 1000 here (ulimit -Hn), and an agent that leads 1000 agents "
        "needs 1384; raise the hard limit of the shell that submits the job, or of slurmd (LimitNOFILE), or take fewer "
        "nodes\n"
    )
    assert agent.err == line
    assert not nodes.run_dir.exists()
    assert not nodes.processes()
