"""How the process that writes checkpoints is started: forked where that can be, else a fresh Python."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from slurm_elastic.snapshot.disk import writer as checkpoint_writer
from slurm_elastic.snapshot.disk.lineage import CheckpointId
from slurm_elastic.snapshot.disk.writer import Order, Outcome, WriterProcess
from slurm_elastic.snapshot.hand_over import Directory, receive, send

ORDER = Order(Directory("/checkpoints", 0.0, 2, 1), CheckpointId(1, 7), "discard")


class Started:
    """A process that has answered its first order already, or ends before that."""

    def __init__(self, *, answers: bool = True) -> None:
        self.killed = False
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if answers:
            send(self.theirs, Outcome(written=True))
        else:
            self.theirs.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return 0


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The processes that were started without a fork."""
    started: list[Started] = []

    def start_child() -> tuple[Started, socket.socket]:
        started.append(Started())
        return started[-1], started[-1].ours

    monkeypatch.setattr(checkpoint_writer, "start_child", start_child)
    return started


def test_it_is_forked_where_that_can_be(fresh: list[Started]) -> None:
    forked = Started()
    writer = WriterProcess(lambda module, should_stop: (forked, forked.ours))
    assert writer.carry_out(ORDER) == Outcome(written=True)
    assert receive(forked.theirs, Order) == (ORDER, [])
    assert fresh == []
    writer.close()
    assert forked.killed


@pytest.mark.parametrize("fork", [None, lambda module, should_stop: None])
def test_else_it_is_a_fresh_python(fresh: list[Started], fork: checkpoint_writer.Fork | None) -> None:
    writer = WriterProcess(fork)
    assert writer.carry_out(ORDER) == Outcome(written=True)
    (process,) = fresh
    assert receive(process.theirs, Order) == (ORDER, [])
    writer.close()


def test_one_that_has_ended_is_started_again_by_the_next_order(fresh: list[Started]) -> None:
    processes = [Started(answers=False), None]

    def fork(module: str, should_stop: Callable[[], bool]) -> tuple[Started, socket.socket] | None:
        forked = processes.pop(0)
        return None if forked is None else (forked, forked.ours)

    writer = WriterProcess(fork)
    assert writer.carry_out(ORDER) == Outcome(error="the process that writes has ended")
    assert writer.carry_out(ORDER) == Outcome(written=True)
    assert len(fresh) == 1
    writer.close()


def test_a_fork_is_not_waited_for_after_a_kill() -> None:
    stops: list[Callable[[], bool]] = []
    forked = Started()

    def fork(module: str, should_stop: Callable[[], bool]) -> tuple[Started, socket.socket]:
        stops.append(should_stop)
        return forked, forked.ours

    writer = WriterProcess(fork)
    writer.start()
    assert not stops[0]()
    writer.kill()
    assert forked.killed
    assert stops[0]()
    assert writer.carry_out(ORDER) == Outcome(error="the process that writes was killed")
    writer.close()
