"""Agents that die, stop or fall silent."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.local.agents import HANG, WORKER, Allocation, agent_command, allocation, eventually
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


def test_a_silent_member_is_given_up_and_joins_again_when_it_goes_on(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_led(QUICK)
    seen = nodes.seen(0)
    agents[2].signal(signal.SIGSTOP)
    shrunk = nodes.comes_to(nodes.nodes[:2], after=0)
    lost = eventually(lambda: [event for event in nodes.events() if event["event"] == "node_lost"])
    assert lost[0]["why"] == "silent"
    assert lost[0]["silent_for"] >= 1
    assert ["127.0.0.3"] in [event["nodes"] for event in lost]

    agents[2].signal(signal.SIGCONT)
    whole = nodes.comes_to(nodes.nodes, after=shrunk)
    # Its old workers were stopped before it joined again.
    assert not is_there(seen[2])
    assert nodes.seen(whole)[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0, 0]


def test_a_paused_leader_loses_nobody(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_all("--rdzv-conf=heartbeat_limit=12")
    nodes.seen(0)
    nodes.formed(0)
    # On a busy machine agents may have agreed on a leader twice before the round.
    before = len(nodes.events())
    leader = agents[nodes.nodes.index(nodes.leader())]
    members = {agent.pid: _sockets(agent.pid) for agent in agents if agent is not leader}
    leader.signal(signal.SIGSTOP)
    # The members miss it: each tries another connection beside its own after half of the heartbeat limit. They stop
    # their workers after five sixths of it.
    eventually(lambda: all(_sockets(pid) - old for pid, old in members.items()))
    leader.signal(signal.SIGCONT)
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    assert nodes.rounds() == 1
    assert [event["event"] for event in nodes.events()[before:]] == ["run_ended"], nodes.log()


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
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0, 0]


def test_of_two_the_one_that_does_not_lead_waits_for_the_other(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all(QUICK)
    seen = nodes.seen(0)
    leads = nodes.nodes.index(nodes.leader())
    leader, member = agents[leads], agents[1 - leads]
    leader.signal(signal.SIGSTOP)
    # It cannot know whether the other side trains, and stops.
    eventually(lambda: not is_there(seen[1 - leads]))
    assert member.running()
    assert nodes.rounds() == 1
    leader.signal(signal.SIGCONT)
    nodes.comes_to(nodes.nodes, after=0)
    nodes.touch("finish")
    assert [leader.wait(), member.wait()] == [0, 0]


_SLOW_TO_END = """
import pathlib, signal, sys, time, torch, torch.distributed as dist
def end(number, frame):
    dist.destroy_process_group()
    pathlib.Path("ending").touch()
    time.sleep(2.0)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
dist.init_process_group("gloo")
last = torch.zeros(1)
while not last:
    time.sleep(0.01)
    last = torch.tensor([float(pathlib.Path("finish").exists())])
    dist.all_reduce(last)
    pathlib.Path("stepped").touch()
# Without it torch (2.13) ends by SIGABRT now and then: a thread of gloo is not joined.
dist.destroy_process_group()
"""


def test_what_fails_because_a_member_was_cut_off_is_not_charged(allocate: Allocate) -> None:
    nodes = allocate(2)
    (nodes.directory / "slow_to_end.py").write_text(_SLOW_TO_END)
    leader, member = nodes.start_all("--nnodes=2", "--rdzv-conf=heartbeat_limit=3", script=["slow_to_end.py"])
    eventually((nodes.directory / "stepped").exists, nodes.log)
    leader.signal(signal.SIGSTOP)
    # Its worker, which it stops, is missed by that of the leader's node at once, and ends 2 s later.
    eventually((nodes.directory / "ending").exists, nodes.log)
    leader.signal(signal.SIGCONT)
    eventually(lambda: nodes.rounds() == 2, nodes.log)
    nodes.touch("finish")
    assert [leader.wait(), member.wait()] == [0, 0]
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


def test_killed_leaders_are_followed_until_one_agent_is_left(allocate: Allocate) -> None:
    nodes = allocate(3)
    left = {agent.node: agent for agent in nodes.start_all()}
    nodes.seen(0)
    killed: list[str] = []
    round_ = 0

    def followed() -> list[str]:
        # An epoch may be claimed in vain, and then once more.
        changes = [event for event in nodes.events() if event["event"] == "leader_changed"]
        changes.sort(key=lambda event: str(event["time"]))
        return list(dict.fromkeys(node for event in changes for node in event["nodes"]))

    for _ in range(2):
        # Nearly always the first of those that are left; any of them may lead.
        killed.append(nodes.leader())
        left.pop(killed[-1]).kill()
        round_ = nodes.comes_to(sorted(left), after=round_)
        eventually(lambda: followed() == killed, nodes.log)
    nodes.touch("finish")
    assert [agent.wait() for agent in left.values()] == [0]
    eventually(lambda: not nodes.processes(), lambda: str(nodes.processes()))


def test_a_leader_that_is_leaving_hands_over(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_all()
    nodes.seen(0)
    agents[0].signal(signal.SIGTERM)
    followed = nodes.comes_to(nodes.nodes[1:], after=0)
    assert nodes.seen(followed)[0]["env"]["SLURM_ELASTIC_REASON"] == "node_left"
    assert agents[0].wait() == 75
    nodes.touch("finish")
    assert [agent.wait() for agent in agents[1:]] == [0, 0]


def test_two_runs_with_one_id_on_the_same_machine(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with allocation(tmp_path / "one", 2) as one, allocation(tmp_path / "other", 2) as other:
        for both in zip(one.start_all(), other.start_all(), strict=True):
            assert both[0].node == both[1].node
        for nodes in (one, other):
            assert nodes.nodes_of(0) == ["127.0.0.1", "127.0.0.2"]
            nodes.touch("finish")
        assert [agent.wait() for agent in (*one.agents, *other.agents)] == [0, 0, 0, 0]


def test_what_a_worker_leaves_behind_is_gone_in_the_next_round(allocate: Allocate) -> None:
    nodes = allocate(2)
    nodes.touch("leave-child")
    agents = nodes.start_all("--max-restarts=1")
    seen = nodes.seen(0)
    (nodes.directory / "leave-child").unlink()
    # Just executed, it may not show its command line yet.
    eventually(lambda: len(nodes.processes("/bin/sleep")) == 2, nodes.log)
    nodes.touch("fail.0.1", "3")
    nodes.seen(1)
    assert not nodes.processes("/bin/sleep")
    assert not any(is_there(record) for record in seen.values())
    nodes.touch("finish")
    assert [agent.wait() for agent in agents] == [0, 0]
    assert not nodes.processes()


def test_what_a_worker_that_ended_well_leaves_behind_is_gone_at_the_end(allocate: Allocate) -> None:
    nodes = allocate(1)
    nodes.touch("leave-child")
    agent = nodes.start(1)
    nodes.seen(0)
    eventually(lambda: nodes.processes("/bin/sleep"), nodes.log)
    nodes.touch("finish")
    assert agent.wait() == 0
    assert not nodes.processes()


def test_a_killed_agent_does_not_leave_workers_that_ignore_sigterm(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, script=(str(WORKER), "ignore-term"))
    nodes.seen(0)
    agent.kill()
    eventually(lambda: not nodes.processes(), lambda: str(nodes.processes()))


def _sockets(pid: int) -> set[str]:
    """The sockets of a process."""
    links = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.add(str(entry.readlink()))
    return {link for link in links if link.startswith("socket:")}


def test_strangers_that_hold_more_connections_than_there_are_descriptors(allocate: Allocate) -> None:
    nodes = allocate(2)
    limited = nodes.directory / "limited.py"
    limited.write_text(
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from slurm_elastic.cli import main\n"
        "sys.exit(main())\n"
    )
    python, _, _, *arguments = agent_command("--local-addr=127.0.0.1", "--max-restarts=1", str(WORKER))
    leader = nodes.command(1, python, str(limited), *arguments)
    endpoint = nodes.run_dir / "endpoints" / "7.0.json"
    # An agent that finds nobody for 10 s leads, and this one imports torch first.
    eventually(endpoint.exists, nodes.log)
    member = nodes.start(2, "--max-restarts=1")
    nodes.seen(0)
    port = json.loads(endpoint.read_text())["port"]
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG))
        # Descriptors are left for a round change, and for agents that come.
        nodes.touch("fail.0.1", "1")
        nodes.seen(1)
        member.signal(signal.SIGTERM)
        assert member.wait() == 75
        alone = nodes.comes_to(nodes.nodes[:1], after=1)
        nodes.start(2, "--max-restarts=1")
        nodes.comes_to(nodes.nodes, after=alone)
        nodes.touch("finish")
        assert [leader.wait(), nodes.agents[-1].wait()] == [0, 0]
    assert leader.err.count("dropped ") == 1
    assert "out of system resource" not in leader.err


def test_a_hard_limit_on_open_files_that_is_too_low_to_lead_is_said_before_anybody_trains(allocate: Allocate) -> None:
    nodes = allocate(1000)
    limited = ("/bin/bash", "-c", 'ulimit -n 1000 && exec "$@"', "bash")
    # Also the one that does not lead at first.
    agents = [
        nodes.command(number, *limited, *agent_command(f"--local-addr=127.0.0.{number}", str(WORKER)))
        for number in (1, 2)
    ]
    assert [agent.wait() for agent in agents] == [2, 2]
    line = (
        "slurm-elastic: error: the limit on open files is 1000 here (ulimit -Hn), and an agent that leads 1000 agents "
        "needs 1384; raise the hard limit of the shell that submits the job, or of slurmd (LimitNOFILE), or take fewer "
        "nodes\n"
    )
    assert [agent.err for agent in agents] == [line, line]
    assert not nodes.run_dir.exists()
    assert not nodes.processes()


def test_a_leader_paused_for_5_s_while_others_connect_forms_one_round_of_all(allocate: Allocate) -> None:
    nodes = allocate(4)
    limit = "--rdzv-conf=heartbeat_limit=3"
    leader = nodes.start(1, limit)
    eventually(nodes.is_led)
    alone = _sockets(leader.pid)
    early = nodes.start(2, limit)
    eventually(lambda: _sockets(leader.pid) - alone)
    leader.signal(signal.SIGSTOP)
    late = [nodes.start(number, limit) for number in (3, 4)]
    # The one that is connected gives it up meanwhile, and comes again; the others wait for its answer.
    time.sleep(5)
    leader.signal(signal.SIGCONT)
    # One that began to lead may have put a round on record, and led no more before anybody began it.
    formed = nodes.comes_to(list(nodes.nodes), -1)
    nodes.touch("finish")
    assert [agent.wait() for agent in (leader, early, *late)] == [0, 0, 0, 0]
    assert [number for number in range(nodes.rounds()) if nodes.was_begun(number)] == [formed]
    # The one that was connected may have begun to lead, as after any silence of that length; nobody counts as lost.
    assert {event["event"] for event in nodes.events()} <= {"leader_changed", "round_formed", "run_ended"}
