"""Real processes stop at one step, however fast they go, and whatever becomes of one of them."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

from tests.local.control.helpers.workers import HANG, ROOT, Workers, workers
from tests.local.waiting import eventually, process_state


def has_come_to(group: Workers, boundary: int) -> None:
    by = time.monotonic() + HANG
    while min(worker.boundary for control in group.controls for worker in control.progress()) < boundary:
        assert time.monotonic() < by, [control.progress() for control in group.controls]
        time.sleep(0.001)


def settled(group: Workers) -> list[int]:
    """The boundaries of workers that wait for each other or for the agents, or for a processor."""
    before: list[int] = []
    while True:
        now = [worker.boundary for control in group.controls for worker in control.progress()]
        if now == before:
            return now
        before = now
        time.sleep(0.02)


def test_coupled_workers_of_two_nodes(tmp_path: Path) -> None:
    with workers(tmp_path, nodes=2, local=2) as group:
        group.ready()
        has_come_to(group, 20)
        step = group.hold() + 3
        group.stop_at(step, "node_joined")
        assert group.last_words() == [f"node_joined {step}"] * 4
        assert all(worker.stopped for control in group.controls for worker in control.progress())
    assert not list(tmp_path.iterdir())


def test_nobody_passes_what_was_answered(tmp_path: Path) -> None:
    """Without a collective, so that flag and boundary are written in the same moment."""
    chance = random.Random(0)
    with workers(tmp_path, nodes=1, local=2, coupled=False) as group:
        group.ready()
        (control,) = group.controls
        for _ in range(10):
            has_come_to(group, max(worker.boundary for worker in control.progress()) + chance.randrange(1000))
            answer = control.hold()
            assert answer is not None
            assert max(settled(group)) <= answer
            control.release()
        step = group.hold()
        group.stop_at(step)
        assert group.last_words() == [f"preempted {step}"] * 2


def test_worker_that_is_stopped_meanwhile(tmp_path: Path) -> None:
    with workers(tmp_path, nodes=2, local=1) as group:
        group.ready()
        has_come_to(group, 20)
        group.processes[0].send_signal(signal.SIGSTOP)
        eventually(lambda: (process_state(group.processes[0].pid) or "?")[0] == "T")
        step = group.hold()
        group.stop_at(step)
        assert not group.controls[0].progress()[0].stopped
        before = group.controls[0].progress()[0].seconds_since_boundary
        time.sleep(0.05)
        after = group.controls[0].progress()[0].seconds_since_boundary
        assert before is not None
        assert after is not None
        assert after - before >= 0.05
        group.processes[0].send_signal(signal.SIGCONT)
        assert group.last_words() == [f"preempted {step}"] * 2


def test_worker_that_is_killed_leaves_others_that_wait_for_their_agent(tmp_path: Path) -> None:
    with workers(tmp_path, nodes=2, local=1) as group:
        group.ready()
        has_come_to(group, 20)
        answer = group.hold()
        assert max(settled(group)) <= answer
        group.processes[0].kill()
        group.processes[0].wait()
        # Slurm may signal workers as well; their agent knows that it takes SIGKILL to end them.
        group.processes[1].send_signal(signal.SIGTERM)
        assert max(settled(group)) <= answer
        assert group.processes[1].poll() is None
        assert group.controls[1].shielded()
        group.processes[1].kill()
        assert not any(worker.stopped for control in group.controls for worker in control.progress())


def test_training_that_ends_before_the_stop_step(tmp_path: Path) -> None:
    with workers(tmp_path, nodes=2, local=1, steps=200) as group:
        group.ready()
        has_come_to(group, 20)
        group.stop_at(max(300, group.hold()))
        assert group.last_words() == ["end 200"] * 2
        assert not any(worker.stopped for control in group.controls for worker in control.progress())


def test_wrapper_that_starts_the_script(tmp_path: Path) -> None:
    script = "import os, subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
    command = (sys.executable, "-c", script, str(ROOT / "tests/local/control/scripts/stepping.py"), "1000000000")
    with workers(tmp_path, nodes=1, local=1, command=command) as group:
        group.ready()
        group.stop_at(group.hold())
        assert group.last_words()[0].startswith("preempted ")


LOADING = """
import multiprocessing
from slurm_elastic import trainer

def load():
    assert [trainer.should_stop(1000 + index) for index in range(8)] == [None] * 8
    trainer.report_checkpoint(1000)

if __name__ == "__main__":
    trainer.should_stop(1)
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=load)
        process.start()
        process.join()
        assert process.exitcode == 0, method
    trainer.should_stop(2)
    print("loaded", flush=True)
"""


def test_processes_of_a_data_loader_are_no_workers(tmp_path: Path) -> None:
    """torch's DataLoader starts them by multiprocessing."""
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    with workers(tmp_path / "pages", nodes=1, local=1, command=(sys.executable, str(script))) as group:
        assert group.last_words() == ["loaded"]
        (worker,) = group.controls[0].progress()
        assert (worker.boundary, worker.step, worker.checkpoint) == (2, 2, None)
