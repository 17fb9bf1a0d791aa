"""Processes that the fork server forks for the agent: they are no workers, and have torch from the start."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.agent.forkserver._processes import ForkedProcess
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.linux import children
from slurm_elastic.agent.forkserver.protocol import State
from slurm_elastic.snapshot.disk import writer as checkpoint_writer
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.writer import Order, Outcome, WriterProcess
from slurm_elastic.snapshot.hand_over import Directory
from tests.local.forkserver.helpers import agent_child
from tests.local.forkserver.helpers.workplace import HANG, Workplace
from tests.local.waiting import eventually

Make = Callable[..., Workplace]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """For tests that leave its fork server alive."""
    made = Workplace(tmp_path_factory.mktemp("place"), with_torch=True)
    assert made.fork_server.wait_ready(HANG)
    assert made.fork_server.state is State.WARM
    yield made
    made.close()


@pytest.fixture
def no_other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is not forked cannot start."""

    def start_child() -> None:
        raise FileNotFoundError("no Python")

    monkeypatch.setattr(checkpoint_writer, "start_child", start_child)


class Writer:
    """A process that writes checkpoints, forked from a fork server."""

    def __init__(self, fork_server: ForkServer, directory: Path) -> None:
        self._directory = directory
        self._forked: list[tuple[ForkedProcess, socket.socket]] = []

        def fork(module: str, should_stop: Callable[[], bool]) -> tuple[ForkedProcess, socket.socket] | None:
            forked = fork_server.fork_child(module, should_stop)
            self._forked += [forked] if forked is not None else []
            return forked

        self.process = WriterProcess(fork)

    @property
    def pid(self) -> int:
        ((child, _),) = self._forked
        return child.pid

    def works(self) -> bool:
        """True if it carries out an order."""
        order = Order(Directory(str(self._directory), 0.0, 1, 1), CheckpointId(1, 1), "discard")
        return self.process.carry_out(order) == Outcome(written=True)


def test_it_outlives_signals_to_the_job_a_round_and_a_fork_server_that_another_one_replaces(
    workplace: Make, tmp_path: Path, no_other_start: None
) -> None:
    held = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.01)\n"
    place = workplace(preload=["held"], modules={"held": held}, with_torch=True)
    # The first workers wait for the preload, and the writer does not.
    eventually(lambda: place.fork_server.wait_ready(0.0) or place.fork_server.state is State.WARM)
    writer = Writer(place.fork_server, tmp_path)
    assert writer.works()
    first = place.fork_server.pid
    (tmp_path / "go").touch()
    assert writer.pid in children(first)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(writer.pid, number)
    place.script.write_text("print('trained')")
    for _round in range(2):
        assert place.run_warm().stdout == "trained\n"
        assert place.fork_server.pid != first
        assert writer.works()
    eventually(lambda: not Path(f"/proc/{first}").exists(), lambda: "the fork server has not ended")
    assert writer.works()

    again = Writer(place.fork_server, place.directory)
    assert again.works()
    assert again.pid in children(place.fork_server.pid)
    for child in (writer, again):
        child.process.close()


def test_it_outlives_a_fork_server_that_is_killed_and_ends_with_its_socket(
    workplace: Make, tmp_path: Path, no_other_start: None
) -> None:
    # The module is that of this package, though the path has one of the same name.
    (tmp_path / "slurm_elastic.py").write_text("raise SystemExit('not this one')")
    place = workplace(environment={**os.environ, "PYTHONPATH": str(tmp_path)}, with_torch=True)
    assert place.fork_server.wait_ready(HANG)
    writer = Writer(place.fork_server, tmp_path)
    assert writer.works()
    os.kill(place.fork_server.pid, signal.SIGKILL)

    def is_dead() -> bool:
        # Its end of the channel is closed: the process that was forked has not inherited it.
        place.fork_server.read()
        return place.fork_server.state is State.DEAD

    eventually(is_dead, lambda: str(place.fork_server.state))
    assert writer.works()
    pid = writer.pid
    writer.process.close()
    assert pid not in children(os.getpid())
    assert not Path(f"/proc/{pid}").exists()


def test_it_has_nothing_of_the_fork_server_but_its_imports_and_takes_no_signal(place: Workplace) -> None:
    # A process that waits for its order: the other end of its channel is the fork server's.
    context = place.context()
    forked = place.fork_server.fork_child(agent_child.__name__)
    assert forked is not None
    child, ours = forked
    with ours:
        told = json.loads(ours.recv(4096))
    context.close(signal.SIGKILL)
    assert told["files"] == [0, 1, 2, told["socket"]]
    assert told["output"] == os.devnull
    assert told["session"]
    assert {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"} <= set(told["blocked"])
    assert child.wait(HANG) in (0, -signal.SIGKILL)


def test_a_fork_server_that_starts_workers_cold_forks_none(workplace: Make, tmp_path: Path) -> None:
    made = workplace(warm=False, with_torch=True)
    assert made.fork_server.wait_ready(HANG)
    assert made.fork_server.fork_child(checkpoint_writer.__name__) is None
    # It starts, and imports torch.
    found = Writer(made.fork_server, tmp_path)
    assert found.works()
    found.process.close()


def test_a_fork_server_that_does_not_answer_is_not_waited_for_when_the_agent_ends(place: Workplace) -> None:
    asked = []

    def should_stop() -> bool:
        asked.append(True)
        return True

    os.kill(place.fork_server.pid, signal.SIGSTOP)
    try:
        assert place.fork_server.fork_child(checkpoint_writer.__name__, should_stop) is None
    finally:
        os.kill(place.fork_server.pid, signal.SIGCONT)
    assert asked == [True]
