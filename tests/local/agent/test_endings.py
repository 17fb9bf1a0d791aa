"""How an agent ends, and what it says last."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable

import pytest

from slurm_elastic.rendezvous.transport.session import PROTOCOL
from slurm_elastic.rundir import RunDir
from tests.local.agents import Allocation, agent_command, eventually

Allocate = Callable[..., Allocation]


def test_a_finished_run_is_0_for_members_and_spares_and_stays_finished(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_all("--nnodes=1:2")
    nodes.seen(0)
    eventually(lambda: "waits as a spare" in nodes.log())
    # The first to finish waits for the other; their end must not depend on who it is.
    nodes.touch("finish.1")
    nodes.touch("finish.0")
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    assert nodes.rounds() == 1
    assert (nodes.run_dir / "done.json").exists()
    again = nodes.start(1, "--nnodes=1:2", SLURM_RESTART_COUNT="1")
    assert again.wait() == 0
    assert "run 7 is finished already: nothing to do" in again.err
    assert nodes.rounds() == 1
    # A further agent of the same step is another run.
    another = nodes.start(1, "--nnodes=1", SLURM_RESTART_COUNT="1")
    assert another.wait() == 0
    assert (nodes.run_dir.with_name("7.1") / "done.json").exists()


def test_a_failed_run_is_1_everywhere_and_its_root_cause_is_said_last(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = nodes.start_led("--nnodes=1:2")
    members = nodes.nodes_of(0)
    eventually(lambda: "waits as a spare" in nodes.log())
    nodes.touch("fail.0.1", "17")
    assert [agent.wait() for agent in agents] == [1, 1, 1]
    leader = agents[0].err.splitlines()
    log = nodes.run_dir / "logs" / "round_0000" / members[1] / "rank_01" / "stderr.log"
    assert leader[-4].endswith(f"error: the run failed: rank 1 on {members[1]} ended with exit code 17")
    assert leader[-3:] == ["  Traceback (most recent call last):", "  ValueError: told to fail", f"the rest: {log}"]
    assert not any("error:" in agent.err for agent in agents[1:])
    assert not (nodes.run_dir / "done.json").exists()
    event = nodes.events()[-1]
    assert (event["event"], event["outcome"], event["nodes"], event["rank"]) == ("run_ended", "failed", [members[1]], 1)
    # A job of `slurm-elastic grow` that starts too late trains nothing, and says so.
    late = allocate(1, job_id="8").start(1, "--run-id=7", SLURM_ELASTIC_GROWS="7", PET_CONSOLE="brief")
    assert late.wait() == 1
    assert "run 7 is over: it needs no more nodes" in late.err
    assert "rank 1 on " in late.err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--interface=nothing0", "--local-addr="], "no interface nothing0 with an IPv4 address on 127.0.0.1; "),
        (["--hang-timeout=1", "--no-watchdog"], "--hang-timeout needs the watchdog: leave out --no-watchdog"),
        (["--worker-signal=SIGKILL"], "--worker-signal 'SIGKILL' is none of SIGUSR1, SIGUSR2"),
        (["--health-token-file=/nonexistent"], "--health-token-file /nonexistent: No such file"),
    ],
)
def test_wrong_usage_is_2_with_one_line(allocate: Allocate, options: list[str], line: str) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, *options)
    assert agent.wait() == 2
    assert agent.err.splitlines()[-1].startswith(f"slurm-elastic: error: {line}")
    assert "Traceback" not in agent.err
    assert nodes.rounds() == 0


def test_an_agent_of_another_protocol_is_2_with_one_line(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader = nodes.start(1)
    eventually(nodes.is_led)
    session = "slurm_elastic.rendezvous.transport.session"
    member = nodes.start(2, constants={f"{session}.PROTOCOL": 0, f"{session}.__version__": "0.0.1"})
    assert member.wait() == 2
    lines = [line for line in member.err.splitlines() if "protocol" in line]
    assert len(lines) == 1
    assert f"speaks protocol {PROTOCOL}, 0.0.1 here speaks 0; install the same version on all nodes" in lines[0]
    leader.expect("slurm_elastic 0.0.1 there speaks protocol 0")


def test_a_leader_that_somebody_has_superseded_lets_go_and_the_run_trains_on(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_led("--max-restarts=1")
    nodes.seen(0)
    # Somebody took the next epoch, and is gone.
    # A file of a stranger takes no epoch.
    (nodes.run_dir / "epochs" / "7.0" / "000002.json").write_text('{"agent": "127.0.0.9/7.0/9"}')
    assert RunDir(nodes.run_dir, "7").claim_record({"agent": "127.0.0.9/7.0/9"}, "epochs", "7.0", 2)
    nodes.touch("fail.0.0", "1")
    nodes.comes_to(nodes.nodes, after=0)
    agents[0].expect("leads no more")
    nodes.finish(*agents)


def test_a_log_directory_that_cannot_be_made_is_one_line(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1)
    eventually((nodes.run_dir / "secret").exists)
    nodes.finish(agent)
    blocked = allocate(1, job_id="8")
    (blocked.run_dir / "logs").mkdir(parents=True)
    (blocked.run_dir / "logs" / "round_0000").write_text("a file")
    agent = blocked.start(1)
    assert agent.wait() == 1
    assert "Traceback" not in agent.err
    assert "no directory for logs" in agent.err.splitlines()[-1]


def test_a_worker_that_nobody_can_start_is_said(allocate: Allocate) -> None:
    nodes = allocate(1)
    program = nodes.directory / "program"
    program.write_text("#!/nowhere/interpreter\n")
    program.chmod(0o755)
    agent = nodes.start(1, "--no-python", script=[str(program)])
    assert agent.wait() == 1
    assert "error: the run failed: rank 0 on 127.0.0.1 ended with exit code 127" in agent.err.splitlines()[-3]
    assert str(program) in agent.err.splitlines()[-2]
    assert "Traceback" not in agent.err


def test_agents_that_give_up_end_a_job_that_has_lost_its_batch_script(allocate: Allocate) -> None:
    # A run of its own: nobody else is to listen on the port of the one that is killed.
    nodes = allocate(3, job_id="41")
    commands, cancelled = nodes.directory / "bin", nodes.directory / "cancelled"
    commands.mkdir()
    (commands / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {cancelled}\n')
    (commands / "scancel").chmod(0o755)
    with socket.socket() as srun:
        # Nobody listens on a port that is bound, as where srun was.
        srun.bind(("127.0.0.1", 0))
        port = str(srun.getsockname()[1])
        agents = nodes.start_led(PATH=str(commands), SLURM_SRUN_COMM_HOST="127.0.0.1", SLURM_SRUN_COMM_PORT=port)
        nodes.seen(0)
        # Nobody can follow the leader.
        shutil.rmtree(nodes.run_dir / "epochs")
        agents[0].kill()
        assert [agent.wait() for agent in agents[1:]] == [75, 75]
        # By the last of them, or by both if they gave up together.
        assert set(cancelled.read_text().split()) == {"41"}
    assert not nodes.processes()


def test_output_that_nobody_reads_holds_nobody_up(allocate: Allocate) -> None:
    nodes = allocate(1)
    os.mkfifo(nodes.directory / "nobody")
    script = nodes.directory / "chatty.py"
    script.write_text("for number in range(40_000): print(number, 'x' * 90)\n")
    reading = os.open(nodes.directory / "nobody", os.O_RDONLY | os.O_NONBLOCK)
    try:
        # As where srun was on a node that has lost its power.
        command = agent_command("--local-addr=127.0.0.1", str(script))
        agent = nodes.command(1, "/bin/sh", "-c", 'exec "$@" >nobody 2>&1', "sh", *command)
        assert agent.wait() == 0
    finally:
        os.close(reading)
    (log,) = nodes.run_dir.glob("logs/*/*/*/stdout.log")
    assert log.read_text().splitlines()[-1].startswith("39999 ")


@pytest.mark.parametrize(("way", "state"), [("fail.0.0", "SUCCEEDED"), ("", "FAILED")])
def test_the_agent_s_own_end_is_an_event_of_torch(allocate: Allocate, way: str, state: str) -> None:
    """As in torch's launch_agent: an agent whose workers fail has done its own work; one that a signal ends has not."""
    nodes = allocate(1)
    agent = nodes.start(1, "--event-log-handler=console")
    nodes.seen(0)
    if way:
        nodes.touch(way, "1")
    else:
        os.kill(agent.pid, signal.SIGTERM)
    agent.wait()
    events = [json.loads(found) for found in re.findall(r'\{"name": "torchelastic[^\n]*', agent.err)]
    ends = [event["metadata"]["state"] for event in events if event["source"] == "AGENT"]
    assert ends[-1:] == [state], agent.err
