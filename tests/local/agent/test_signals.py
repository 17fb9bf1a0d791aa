"""SIGTERM at every moment of an agent's life: it ends soon, with 75, and more of them change nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.agents import WORKER, Allocation, agent_command, eventually

Allocate = Callable[..., Allocation]

PATIENT = "--rdzv-conf=join_timeout=300,last_call_timeout=300"


def test_while_nobody_leads_yet(allocate: Allocate) -> None:
    nodes = allocate(2)
    waiting = nodes.start(2, PATIENT)
    # Its first visible act after signals are recorded.
    eventually((nodes.run_dir / "secret").exists)
    waiting.signal(signal.SIGTERM)
    assert waiting.wait() == 75
    assert nodes.rounds() == 0


def test_while_others_are_waited_for(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader = nodes.start(1, PATIENT, "--nnodes=2:2")
    eventually((nodes.run_dir / "endpoints" / "7.0.json").exists)
    leader.signal(signal.SIGTERM)
    assert leader.wait() == 75


def test_as_a_spare(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader = nodes.start(1, "--nnodes=1:1")
    nodes.seen(0)
    spare = nodes.start(2, "--nnodes=1:1")
    spare.expect("waits as a spare")
    spare.signal(signal.SIGTERM)
    assert spare.wait() == 75
    nodes.touch("finish")
    assert leader.wait() == 0
    assert nodes.rounds() == 1


def test_when_the_own_workers_have_finished(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader, member = nodes.start_all(LOGLEVEL="DEBUG")
    nodes.seen(0)
    nodes.touch("finish.1")
    member.expect("the workers of 127.0.0.2 have ended well")
    member.signal(signal.SIGTERM)
    assert member.wait() == 75
    # It has done its part, so the others are not disturbed.
    nodes.touch("finish")
    assert leader.wait() == 0
    assert nodes.rounds() == 1


def test_all_at_once_and_again_while_workers_take_their_time(allocate: Allocate) -> None:
    nodes = allocate(3)
    script = nodes.directory / "slow_to_stop.py"
    script.write_text(_SLOW_TO_STOP)
    agents = nodes.start_all(script=[str(script)])
    eventually(lambda: len(list(nodes.directory.glob("ready.*"))) == 3)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    for agent in agents:
        agent.expect("got SIGTERM: leaving round 0")
        agent.signal(signal.SIGTERM)
    # The others' leaving ends the round here too, which is no reason to join again.
    nodes.touch("stop.1", "0")
    assert agents[1].wait() == 75
    assert agents[0].running()
    # Nor is the end of the leader a reason to take the workers' time away.
    nodes.touch("stop.0", "0")
    assert agents[0].wait() == 75
    agents[2].signal(signal.SIGTERM)
    nodes.touch("stop.2", "3")
    assert agents[2].wait() == 75
    assert len(list(nodes.directory.glob("saved.*"))) == 3
    assert nodes.rounds() == 1
    assert not nodes.processes()


_SLOW_TO_STOP = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
def stop(number, frame):
    told = pathlib.Path("stop." + rank)
    while not told.exists():
        time.sleep(0.05)
    time.sleep(float(told.read_text()))
    pathlib.Path("saved." + rank).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path("ready." + rank).touch()
time.sleep(300)
"""


def test_workers_that_ignore_it_are_killed_after_their_time(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, "--shutdown-timeout=1", script=(str(WORKER), "ignore-term"))
    nodes.seen(0)
    begun = time.monotonic()
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75
    # torchrun's default would be 30 s; a second for the workers and some for a busy machine.
    assert time.monotonic() - begun < 15
    assert not nodes.processes()


def test_while_python_is_still_importing(allocate: Allocate) -> None:
    nodes = allocate(1)
    agent = nodes.command(1, *agent_command("--local-addr=127.0.0.1", str(WORKER)))
    # SIGTERM stands in the mask of caught signals as soon as it is recorded, proc(5); torch is not imported then.
    eventually(lambda: _catches(agent.pid, signal.SIGTERM))
    assert not nodes.run_dir.exists()
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert nodes.rounds() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_while_python_ends(number: signal.Signals) -> None:
    script = f"""if True:
        import os, sys
        from slurm_elastic.agent.notices import record_signals

        record_signals()

        class Last:
            kill, pid = os.kill, os.getpid()

            def __del__(self):
                Last.kill(Last.pid, {int(number)})

        last = Last()
        sys.exit(75)
    """
    assert subprocess.run([sys.executable, "-c", script]).returncode == 75


def _catches(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)
