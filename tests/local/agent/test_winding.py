"""A round that ends as planned costs no step."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.local.agents import HANG, Allocation, eventually
from tests.local.waiting import at_once

Allocate = Callable[..., Allocation]
STEPPING = str(Path(__file__).parents[1] / "stepping.py")


def training(nodes: Allocation, *arguments: str, words: tuple[str, ...] = (), pace: float = 0.01) -> list[Any]:
    """Agents on all nodes, whose workers have taken some steps."""
    nodes.touch("pace", str(pace))
    agents = nodes.start_all("--nnodes=1:4", *arguments, script=(STEPPING, *words))
    stepped(nodes, 0)
    return agents


def steps(nodes: Allocation, rank: int = 0) -> list[tuple[int, int, float]]:
    """The steps that a rank has taken: round, step, moment."""
    path = nodes.directory / f"steps.{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(round_), int(step), float(at)) for round_, step, _, at in map(str.split, lines)]


def stepped(nodes: Allocation, round_: int, least: int = 3) -> None:
    """Wait until rank 0 has taken steps in this round."""
    eventually(lambda: len([1 for number, *_ in steps(nodes) if number == round_]) >= least, nodes.log)


def into_a_long_step(nodes: Allocation) -> None:
    """Wait until a rank is in a step of five minutes, so that none can come to the end of it."""
    nodes.touch("pace", "300")
    eventually(lambda: list(nodes.directory.glob("in-300.*")), nodes.log)


def ended_at(nodes: Allocation, round_: int) -> set[int]:
    """The last steps of all ranks in a round."""
    found = set()
    for path in nodes.directory.glob("steps.*"):
        taken = [step for number, step, _ in steps(nodes, int(path.suffix[1:])) if number == round_]
        found |= {max(taken)} if taken else set()
    return found


def no_step_was_lost(nodes: Allocation) -> None:
    taken = [step for _, step, _ in steps(nodes)]
    assert taken == list(range(1, len(taken) + 1)), nodes.log()


def test_a_node_leaves_and_another_comes_and_no_step_is_lost(allocate: Allocate) -> None:
    nodes = allocate(3)
    first, second, third = training(nodes)
    second.signal(signal.SIGTERM)
    assert second.wait() == 75
    stepped(nodes, 1)
    assert nodes.nodes_of_round(1) == ["127.0.0.1", "127.0.0.3"]
    nodes.start(2, "--nnodes=1:4", script=(STEPPING,))
    stepped(nodes, 2)
    assert len(nodes.nodes_of_round(2)) == 3
    nodes.finish(first, third, nodes.agents[-1])
    no_step_was_lost(nodes)
    assert len(ended_at(nodes, 0)) == len(ended_at(nodes, 1)) == 1
    ends = [event for event in nodes.events() if event["event"] == "round_ended"]
    assert [end["reason"] for end in ends] == ["node_left", "node_joined"]
    assert all("step" in end for end in ends), "nobody was interrupted"
    assert "stops after" in first.out
    assert not nodes.processes()


def test_a_node_that_joins_a_living_run_has_imported_before_what_its_workers_need(allocate: Allocate) -> None:
    nodes, others = allocate(1), allocate(1, job_id="8")
    nodes.touch("pace", "0.01")
    run = f"runpy.run_path({STEPPING!r})['main']()"
    script = f"import runpy, sys\nprint('imported:', 'waiting' in sys.modules)\n{run}\n"
    (nodes.directory / "importing.py").write_text(script)
    living = ("--run-id=living", "--nnodes=1:2", "importing.py")
    first = nodes.start(1, *living)
    first.expect("round 0 formed")
    (nodes.directory / "waiting.py").write_text(
        "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n"
    )
    # However long that takes.
    constants = {"slurm_elastic.agent.run._IMPORT_TIMEOUT": 300.0}
    second = others.start(1, "--start=warm", "--preload=waiting", *living, constants=constants)
    # The leader knows of it before it is ready, so that others which come about now can wait for it.
    place = nodes.directory / "elastic-runs" / "living" / "health" / "127.0.0.1.8.json"
    eventually(place.exists, nodes.log)
    ((group,),) = [json.loads(place.read_text())]
    status: dict[str, Any] = {}
    while not status.get("leader"):
        with urllib.request.urlopen(f"http://{group['targets'][0]}/status", timeout=HANG) as answer:
            status = json.load(answer)
    assert status["state"] == "starting"
    nodes.touch("go")
    eventually(lambda: "imported: " in second.out and second.out.endswith("\n"), nodes.log)
    assert "imported: True" in second.out
    stepped(nodes, 1)
    nodes.finish(first, second)


def test_the_node_of_rank_0_leaves_and_serves_the_store_until_all_have_stopped(allocate: Allocate) -> None:
    nodes = allocate(2)
    first, second = training(nodes)
    first.signal(signal.SIGTERM)
    assert first.wait() == 75
    # It led, too; the other one leads now.
    stepped(nodes, 1)
    nodes.finish(second)
    # Who comes to the next leader on its way out is told once more that the round is over.
    assert [end["step"] > 0 for end in nodes.events() if end["event"] == "round_ended" and "step" in end] == [True]
    no_step_was_lost(nodes)
    assert len(ended_at(nodes, 0)) == 1


def test_all_nodes_leave_at_once_and_all_stop_at_one_step(allocate: Allocate) -> None:
    nodes = allocate(3)
    agents = training(nodes)
    at_once([(agent, signal.SIGTERM) for agent in agents])
    assert [agent.wait() for agent in agents] == [75, 75, 75]
    (last,) = ended_at(nodes, 0)
    assert (nodes.directory / "checkpoint").read_text() == str(last)
    assert nodes.rounds() == 1
    assert not nodes.processes()


def test_a_step_that_takes_too_long_is_not_waited_for(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = training(nodes, "--shutdown-timeout=4", "--rdzv-conf=leave_margin=2")
    into_a_long_step(nodes)
    begun = time.monotonic()
    agents[1].signal(signal.SIGTERM)
    assert agents[1].wait() == 75
    # It would be 30 s by default.
    assert 2.0 <= time.monotonic() - begun < 25.0
    eventually(lambda: any(event["event"] == "round_ended" and "step" not in event for event in nodes.events()))


def test_a_checkpoint_that_takes_longer_than_the_grace_is_not_waited_for(allocate: Allocate) -> None:
    nodes = allocate(2)
    first, second = training(nodes, "--grace=4", "--shutdown-timeout=4", words=("slow-to-save",))
    begun = time.monotonic()
    second.signal(signal.SIGTERM)
    assert second.wait() == 75
    assert time.monotonic() - begun < 25.0
    stepped(nodes, 1)
    assert not (nodes.directory / "checkpoint").exists()
    nodes.finish(first)
    assert {event["restarts"] for event in nodes.events() if event["event"] == "round_formed"} == {0}


def test_workers_that_end_well_on_a_signal_have_not_finished_the_run(allocate: Allocate) -> None:
    nodes = allocate(2)
    agents = training(nodes, "--worker-signal=SIGUSR1", words=("on-signal",))
    agents[1].signal(signal.SIGTERM)
    assert agents[1].wait() == 75
    stepped(nodes, 1)
    assert (nodes.directory / "checkpoint").exists()
    assert "the run succeeded" not in nodes.log()
    nodes.finish(agents[0])


def test_workers_that_slurm_itself_signals_have_not_finished_the_run(allocate: Allocate) -> None:
    nodes = allocate(1)
    (agent,) = training(nodes, words=("on-term",))
    into_a_long_step(nodes)
    agent.signal(signal.SIGTERM)
    agent.expect("leaving round 0")
    for pid in nodes.processes("stepping.py"):
        os.kill(pid, signal.SIGTERM)
    assert agent.wait() == 75
    assert not (nodes.run_dir / "done.json").exists()
