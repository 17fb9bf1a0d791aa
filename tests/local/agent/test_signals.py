"""SIGTERM at every moment of an agent's life: it ends soon, with 75, and more of them change nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver.protocol import wait_on
from tests.local.agents import WORKER, Allocation, agent_command, eventually
from tests.local.waiting import at_once

Allocate = Callable[..., Allocation]

PATIENT = "--rdzv-conf=join_timeout=300,last_call_timeout=300"


@pytest.mark.parametrize("number", [1, 2], ids=["the one that leads", "one that looks for the leader"])
def test_before_the_first_round(allocate: Allocate, number: int) -> None:
    nodes = allocate(2)
    agent = nodes.start(number, PATIENT, "--nnodes=2:2")
    # The first visible act of an agent after signals are recorded is that it makes this file.
    eventually(nodes.is_led if number == 1 else (nodes.run_dir / "secret").exists)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert nodes.rounds() == 0


def test_as_a_spare(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader = nodes.start(1, "--nnodes=1:1")
    nodes.seen(0)
    spare = nodes.start(2, "--nnodes=1:1")
    spare.expect("waits as a spare")
    spare.signal(signal.SIGTERM)
    assert spare.wait() == 75
    nodes.finish(leader)
    assert nodes.rounds() == 1


def _look_late(descriptors: Iterable[int], seconds: float | None) -> set[int]:
    """Look for messages of the fork server as `wait_on`, and return what it saw when they may have ended since."""
    readable = wait_on(descriptors, seconds)
    time.sleep(0.2)
    return readable


def test_when_a_worker_ends_while_the_agent_looks_at_it(allocate: Allocate) -> None:
    nodes = allocate(1)
    (nodes.directory / "t.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit()))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(600)\n"
    )
    late = {"slurm_elastic.agent.forkserver.protocol.wait_on": _look_late}
    agent = nodes.start(1, script=["t.py"], constants=late)
    eventually((nodes.directory / "ready").exists)
    began = time.monotonic()
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert time.monotonic() - began < 20, "it has waited for SIGKILL, 29 s"


def test_when_the_own_workers_have_finished(allocate: Allocate) -> None:
    nodes = allocate(2)
    leader, member = nodes.start_led(LOGLEVEL="DEBUG")
    nodes.seen(0)
    nodes.touch("finish.1")
    member.expect("the workers of 127.0.0.2 have ended well")
    member.signal(signal.SIGTERM)
    assert member.wait() == 75
    # It has done its part, so the others are not disturbed.
    nodes.finish(leader)
    assert nodes.rounds() == 1


def test_all_at_once_and_again_while_workers_take_their_time(allocate: Allocate) -> None:
    nodes = allocate(3)
    script = nodes.directory / "slow_to_stop.py"
    script.write_text(_SLOW_TO_STOP)
    agents = nodes.start_all("--shutdown-timeout=300", script=[str(script)])
    eventually(lambda: len(list(nodes.directory.glob("ready.*"))) == 3)
    at_once([(agent, signal.SIGTERM) for agent in agents])
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
    # torchrun's default would be 30 s.
    assert 1 <= time.monotonic() - begun < 25
    assert not nodes.processes()


_WAITS_BEFORE_TORCH = """
import importlib.abc, pathlib, sys, time
class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            pathlib.Path("importing").touch()
            while not pathlib.Path("signalled").exists():
                time.sleep(0.01)
        return None
sys.meta_path.insert(0, Gate())
"""


def test_while_python_is_still_importing(allocate: Allocate) -> None:
    nodes = allocate(1)
    site = nodes.directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_WAITS_BEFORE_TORCH)
    path = os.pathsep.join([str(site), nodes.environment(1)["PYTHONPATH"]])
    agent = nodes.command(1, *agent_command("--local-addr=127.0.0.1", str(WORKER)), PYTHONPATH=path)
    eventually((nodes.directory / "importing").exists, nodes.log)
    agent.signal(signal.SIGTERM)
    nodes.touch("signalled")
    assert agent.wait() == 75
    assert nodes.rounds() == 0


def test_a_signal_whose_handler_has_not_run_wakes_a_selector() -> None:
    """Python runs a handler late where the signal comes right before the selector waits."""
    script = """if True:
        import os, select, signal, sys
        from slurm_elastic.agent.signals import record_signals

        notices = record_signals()
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGTERM)
        awake = select.select([notices.fd], [], [], 0)[0]
        notices.drain()
        if (pid := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(pid, 0)
        by_child = select.select([notices.fd], [], [], 0)[0]
        print(len(awake), len(by_child))
    """
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["1", "0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_while_python_ends(number: signal.Signals) -> None:
    script = f"""if True:
        import os, sys
        from slurm_elastic.agent.signals import record_signals

        record_signals()

        class Last:
            kill, pid = os.kill, os.getpid()

            def __del__(self):
                Last.kill(Last.pid, {int(number)})

        last = Last()
        sys.exit(75)
    """
    assert subprocess.run([sys.executable, "-c", script]).returncode == 75


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_a_worker_s_signal_to_its_parent_reaches_the_agent(allocate: Allocate, tmp_path: Path, how: str) -> None:
    """With torchrun the parent of a worker is the agent."""
    script = tmp_path / "signals.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(1000)\n")
    agent = allocate(1).start(1, f"--start={how}", script=[str(script)])
    assert agent.wait() == 75
