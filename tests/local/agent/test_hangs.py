"""Workers that take no step any more, and workers that nothing can end."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.control.answers import collectives
from slurm_elastic.failures.history import strikes
from tests.local.agent.test_health import ask, status, target
from tests.local.agents import Allocation, eventually
from tests.planted_faults import planted

Allocate = Callable[..., Allocation]
ABSENT = str(Path(__file__).parent / "scripts" / "absent.py")
LINE = 1 + Path(ABSENT).read_text().splitlines().index("    time.sleep(1000)")
STEPPING = str(Path(__file__).parent / "scripts" / "stepping.py")
FREEZER = Path("/sys/fs/cgroup/freezer")


def test_a_worker_without_steps_hangs_and_no_other_does(allocate: Allocate) -> None:
    nodes = allocate(2)
    # As long as a worker that has something to do may have to wait for a processor.
    agents = nodes.start_all("--max-restarts=1", "--hang-timeout=3", script=[STEPPING])
    where = target(nodes, 2)
    eventually(lambda: nodes.rounds() == 2, nodes.log)
    eventually(lambda: status(where)["state"] == "training", nodes.log)
    eventually(lambda: (status(where)["workers"][0]["step"] or 0) > 1000, nodes.log)
    metrics = ask(where, "/metrics")[1]
    nodes.finish(*agents)
    (hang,) = [event for event in nodes.events() if event["event"] == "worker_hung"]
    assert (hang["rank"], hang["scope"], hang["steps"], hang["round"]) == (1, "step", 5, 0)
    seconds = re.search(r"no step for ([\d.]+) s", hang["text"])
    assert seconds is not None, hang["text"]
    assert float(seconds[1]) >= 3
    assert f"process {hang['pid']}," in Path(hang["stacks"]).read_text()
    (ended,) = [event for event in nodes.events() if event["event"] == "round_ended" and event["round"] == 0]
    assert ended["reason"] == "worker_failed"
    steps = next(line for line in metrics.splitlines() if line.startswith("slurm_elastic_steps_total{"))
    assert float(steps.split()[-1]) > 5


def test_a_hang_names_the_rank_on_another_node_that_is_behind(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = nodes.start_all("--max-restarts=1", script=[STEPPING, "together"])
    eventually(lambda: nodes.rounds() == 2, nodes.log)
    nodes.finish(*agents)
    (ended,) = [event for event in nodes.events() if event["event"] == "round_ended" and event["round"] == 0]
    assert "rank 0: by the watchdog: timer 'all_reduce' expired" in ended["text"]
    assert "; rank 1 is behind: 5 steps in this round, others" in ended["text"]
    (hang,) = [event for event in nodes.events() if event["event"] == "worker_hung"]
    assert (hang["rank"], hang["scope"], hang["signal"], hang["round"]) == (0, "all_reduce", "SIGKILL", 0)
    stacks = nodes.run_dir / "logs" / "round_0000" / nodes.nodes[0] / "rank_00" / "stacks.txt"
    assert hang["stacks"] == str(stacks)
    assert f"process {hang['pid']}," in stacks.read_text()
    formed = [event for event in nodes.events() if event["event"] == "round_formed"]
    assert [(event["reason"], event["restarts"]) for event in formed] == [("start", 0), ("worker_failed", 1)]


def test_a_hang_names_the_rank_that_does_not_come_to_a_collective(allocate: Allocate) -> None:
    nodes = allocate(2)
    # Rank 0 waits in the collective for as long as rank 1 does something else: both expire, whichever is seen first.
    agents = nodes.start_all("--max-restarts=1", "--hang-timeout=3", script=[ABSENT])
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    (ended,) = [event for event in nodes.events() if event["event"] == "round_ended" and event["round"] == 0]
    who = "; rank 1 is not in the collective that others wait in (all_reduce, number 6), after 5 steps; "
    assert f"{who}at absent.py:{LINE} in load_batch" in ended["text"]
    assert ended["stragglers"] == [{"rank": 1, "node": nodes.nodes[1]}]
    # On a busy machine a worker of the next round may take no step for 3 s before its first one.
    of_round = [(0.0, event) for event in nodes.events() if event.get("round") == 0]
    assert {strike.node for strike in strikes(of_round)} == {nodes.nodes[1]}, nodes.events()
    for rank, node, last in ((0, nodes.nodes[0], 6), (1, nodes.nodes[1], 5)):
        logs = nodes.run_dir / "logs" / "round_0000" / node / f"rank_{rank:02}"
        assert collectives((logs / "flight_recorder.json").read_bytes()) == (("0", last, "all_reduce"),)
        assert has_place(logs, in_collective=rank == 0)
        assert not list(logs.glob("*.new"))
    assert nodes.action(of_round=0) == planted("a rank that does not come to a collective").action


def test_a_worker_that_hangs_before_its_first_step_is_found(allocate: Allocate) -> None:
    nodes = allocate(1)
    (nodes.directory / "t.py").write_text(
        "import faulthandler, os, time\nfrom slurm_elastic import trainer\nfaulthandler.enable()\n"
        'if (os.environ["RANK"], trainer.start_info().round) == ("1", 0):\n    time.sleep(1000)\n'
    )
    options = ("--nproc-per-node=2", "--max-restarts=1", "--hang-timeout=600", "--first-step-timeout=2")
    agent = nodes.start(1, *options, script=["t.py"], PET_CONSOLE="brief")
    assert agent.wait() == 0, agent.err
    # The stacks are in a file that the agent's line names.
    assert "rank 1 on 127.0.0.1 hangs: " in agent.err
    assert "Fatal Python error" not in agent.err
    (stderr,) = nodes.run_dir.glob("logs/round_0000/*/rank_01/stderr.log")
    assert "Fatal Python error: Aborted" in stderr.read_text()
    (hang,) = [event for event in nodes.events() if event["event"] == "worker_hung"]
    assert (hang["rank"], hang["steps"], hang["round"]) == (1, 0, 0)


def test_a_worker_that_does_not_end_is_named_with_its_stacks(allocate: Allocate) -> None:
    nodes = allocate(1)
    (nodes.directory / "t.py").write_text(
        "import os, pathlib, time\n"
        'while os.environ["RANK"] == "1" and not pathlib.Path("finish").exists():\n    time.sleep(0.1)\n'
    )
    watchdog = "slurm_elastic.agent.watchdog.watchdog"
    quick = {f"{watchdog}._SAID_AFTER": 0.5, f"{watchdog}._TICK": 0.2, f"{watchdog}._WATCHED_AFTER": 0.5}
    options = ("--nproc-per-node=2", "--stacks-after=1", "--hang-timeout=600")
    agent = nodes.start(1, *options, script=["t.py"], constants=quick)
    agent.expect("rank 0 ended 10 s ago, and rank 1 still runs")
    agent.expect("rank 1 has still not ended; stacks in ")
    agent.expect("--hang-timeout watches nothing so far")
    nodes.finish(agent)
    stacks = agent.err.partition("not ended; stacks in ")[2].split()[0]
    assert re.search(r"process \d+,", Path(stacks).read_text())


@pytest.mark.parametrize("off", [{"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, {"PET_NO_WATCHDOG": "1"}])
def test_the_watchdog_can_be_switched_off(allocate: Allocate, off: dict[str, str]) -> None:
    nodes = allocate(1)
    agent = nodes.start(1, **off)
    assert "TORCHELASTIC_TIMER_FILE" not in nodes.seen(0)[0]["env"]
    nodes.finish(agent)


def has_place(logs: Path, *, in_collective: bool) -> bool:
    """Whether the logs of a rank of round 0 have its place in the script.

    If its collective has failed, as it timed out or as the other worker was killed a second earlier, that is the
    traceback.
    """
    places = ["stacks.txt", "stderr.log"] if in_collective else ["stacks.txt"]
    return any('absent.py", line' in (logs / name).read_text() for name in places if (logs / name).exists())


@pytest.mark.parametrize(
    ("fault", "how", "options", "who", "stragglers"),
    [
        (
            "a rank that does not come to a collective, which times out",
            "timeout",
            (),
            "; rank 1 is not in the collective that others wait in (all_reduce, number 6), after 5 steps; at absent.py",
            [1],
        ),
        (
            "a rank that calls another collective",
            "different",
            ("--hang-timeout=3",),
            ", both number 6 of their process group: the script calls different collectives; at absent.py",
            [],
        ),
        (
            "a rank that does not come to a collective, which times out, in a plain script",
            "plain",
            ("--start=warm",),
            "; rank 1 is not in the collective that others wait in (all_reduce, number 6); at absent.py",
            [1],
        ),
    ],
)
def test_what_the_flight_recorder_tells(
    allocate: Allocate, fault: str, how: str, options: tuple[str, ...], who: str, stragglers: list[int]
) -> None:
    nodes = allocate(2)
    agents = nodes.start_led("--max-restarts=1", *options, script=[ABSENT, how])
    assert [agent.wait() for agent in agents] == [0, 0], nodes.log()
    (ended,) = [event for event in nodes.events() if event["event"] == "round_ended" and event["round"] == 0]
    assert who in ended["text"]
    assert [each["rank"] for each in ended.get("stragglers", [])] == stragglers
    assert nodes.action(of_round=0) == planted(fault).action
    for rank, node in enumerate(nodes.nodes):
        logs = nodes.run_dir / "logs" / "round_0000" / node / f"rank_{rank:02}"
        assert (logs / "flight_recorder.json").exists()
        assert has_place(logs, in_collective=rank == 0 or how == "different")


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Freezes a process: the kernel holds it in uninterruptible sleep, whatever signal comes."""
    if os.geteuid() != 0 or not FREEZER.is_dir():
        pytest.skip("needs root and the freezer of control groups, version 1")
    group = Path(tempfile.mkdtemp(prefix="slurm-elastic-test-", dir=FREEZER))

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        eventually(lambda: (group / "freezer.state").read_text() == "FROZEN\n")

    yield freeze
    (group / "freezer.state").write_text("THAWED")
    eventually(lambda: (group / "cgroup.procs").read_text() == "")
    with contextlib.suppress(OSError):
        group.rmdir()


def test_an_agent_that_cannot_end_its_worker_leaves_the_others(
    allocate: Allocate, frozen: Callable[[int], None]
) -> None:
    nodes = allocate(2)
    first, second = nodes.start_all("--max-restarts=1")
    pid = nodes.seen(0)[1]["pid"]
    frozen(pid)
    nodes.touch("fail.0.0", "1")
    assert nodes.nodes_of(1) == [nodes.nodes[0]]
    assert second.wait() == 1
    text = f"{nodes.nodes[1]} has processes that SIGKILL does not end ({pid} in uninterruptible sleep), so it leaves"
    assert text in second.err
    nodes.finish(first)


def test_the_end_of_the_run_is_no_success_of_a_node_with_such_a_process(
    allocate: Allocate, frozen: Callable[[int], None]
) -> None:
    nodes = allocate(1)
    nodes.touch("leave-child")
    agent = nodes.start(1)
    nodes.seen(0)
    ((pid, _),) = eventually(lambda: nodes.processes("/bin/sleep").items())
    frozen(pid)
    nodes.touch("finish")
    assert agent.wait() == 1
    assert f"has processes that SIGKILL does not end ({pid} in uninterruptible sleep)" in agent.err
