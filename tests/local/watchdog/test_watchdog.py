"""The watchdog with real processes. They write what torch's client writes; one of them is torch's client."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from slurm_elastic.agent.watchdog import hangs, watchdog
from slurm_elastic.agent.watchdog.hangs import Hang
from slurm_elastic.agent.watchdog.stacks import Watched
from slurm_elastic.agent.watchdog.timers import make_pipe
from slurm_elastic.agent.watchdog.watchdog import Watchdog
from slurm_elastic.control.agent_side import Agreement
from slurm_elastic.control.shared_page import ANSWERER, ASKED, DUMPED
from tests.local.waiting import HANG, eventually

CLIENT = """
import json, os, signal, sys, time

def ask(scope, after, pid=None, number=9):
    # "\\n" ends it; after None releases.
    expires = -1 if after is None else time.time() + after
    record = {"version": 1, "pid": pid or os.getpid(), "scope_id": scope, "expiration_time": expires, "signal": number}
    send(json.dumps(record).encode() + b"\\n")

def send(content):
    fd = os.open(sys.argv[1], os.O_WRONLY)
    while content:
        content = content[os.write(fd, content):]
    os.close(fd)
"""


class Process(subprocess.Popen[bytes]):
    """One to which the test speaks."""

    stdin: IO[bytes]
    stdout: IO[bytes]


class Node:
    """A watchdog, and workers of it."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        self.hangs: queue.Queue[Hang] = queue.Queue()
        self.torch_events: list[str] = []
        pipe = make_pipe({}, directory)
        self.watchdog = Watchdog(pipe, self.hangs.put, None, 60.0)
        self.watchdog.start(lambda name, _request: self.torch_events.append(name))
        stack.callback(self.watchdog.stop)

    def process(self, code: str) -> Process:
        """Run code after CLIENT, to the point where it prints."""
        process = Process(
            [sys.executable, "-c", CLIENT + textwrap.dedent(code), self.watchdog.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.directory / "stderr").open("wb"),
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.stdin.close)
        return process

    def worker(self, code: str, rank: int = 0, agreement: Agreement | None = None) -> Process:
        """The only worker of a round."""
        process = self.process(code)
        self.watchdog.watch([Watched(process.pid, rank, 0, 0, self.directory)], agreement=agreement)
        return process

    def hang(self) -> Hang:
        return self.hangs.get(timeout=HANG)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node with a watchdog; the parameter, if any, is its dump timeout."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(hangs, "DUMP_TIMEOUT", getattr(request, "param", 1.0))
    with ExitStack() as stack:
        yield Node(tmp_path, stack)


class NotedPage(list[int]):
    """A control page of a worker that has written its dump; notes when it was asked for that."""

    asked_at = float("inf")

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if key == ASKED:
            self.asked_at = time.monotonic()
            super().__setitem__(DUMPED, value)


def test_the_workers_of_other_nodes_have_a_second_for_their_dumps(node: Node) -> None:
    page = NotedPage([0] * 128)
    page[ANSWERER] = 1
    worker = node.worker("ask('step', 0.2); time.sleep(60)", agreement=Agreement([page]))
    node.hang()
    assert worker.wait(HANG) == -signal.SIGKILL
    assert time.monotonic() - page.asked_at >= 1.0


def test_a_hung_worker_is_killed_and_its_stacks_kept(node: Node) -> None:
    worker = node.worker("ask('step', 0.2); time.sleep(60)", rank=5)
    hang = node.hang()
    assert worker.wait(HANG) == -signal.SIGKILL
    assert (hang.worker.rank, hang.scope, hang.killed) == (5, "step", signal.SIGKILL)
    assert 0 <= hang.seconds <= 0.2
    # Until the next round has workers, whose process ids may be the same.
    node.watchdog.unwatch()
    assert node.watchdog.hang_of(worker.pid) == hang
    node.watchdog.watch([])
    assert node.watchdog.hang_of(worker.pid) is None
    stacks = Path(hang.stacks).read_text()
    assert f"thread {worker.pid} python" in stacks
    assert node.hangs.empty()


def test_torchs_own_client_is_understood(node: Node) -> None:
    worker = node.worker(
        """
        from torch.distributed.elastic import timer
        timer.configure(timer.FileTimerClient(sys.argv[1]))
        with timer.expires(after=60, scope="long"):
            with timer.expires(after=60, scope="short"):
                time.sleep(0.01)
            with timer.expires(after=0.1, scope="hangs"):
                time.sleep(60)
        """
    )
    assert node.hang().scope == "hangs"
    assert worker.wait(HANG) == -signal.SIGKILL
    # Told by the thread that has killed it.
    eventually(lambda: "kill worker process" in node.torch_events)
    node.watchdog.stop()
    assert node.torch_events == ["watchdog started", "timer expired", "kill worker process", "watchdog stopped"]
    assert not Path(node.watchdog.path).exists()


# On a busy machine Python may have to wait for a processor for longer than the second that it gets otherwise.
@pytest.mark.parametrize("node", [HANG], indirect=True)
def test_python_writes_its_stacks_where_faulthandler_is_on(node: Node) -> None:
    worker = node.worker(
        """
        import faulthandler
        faulthandler.enable()
        def stuck():
            ask('step', 0.1)
            time.sleep(60)
        stuck()
        """
    )
    assert worker.wait(HANG) == -signal.SIGABRT
    assert "in stuck" in (node.directory / "stderr").read_text()


@pytest.mark.parametrize(
    "code",
    [
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ask('step', 0.1, number=15); time.sleep(60)",
        "signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(60)",
        "signal.signal(signal.SIGABRT, lambda *_: None); signal.sigwait([signal.SIGUSR1])",
    ],
)
def test_a_worker_that_resists_is_killed_in_the_end(node: Node, code: str) -> None:
    worker = node.worker(f"ask('step', 0.1)\n{code}")
    assert worker.wait(HANG) == -signal.SIGKILL


def test_a_timer_of_a_child_counts_for_its_worker(node: Node) -> None:
    worker = node.worker("child = os.fork()\nif not child: ask('load', 0.1)\ntime.sleep(60)")
    hang = node.hang()
    assert hang.worker.pid == worker.pid
    assert hang.pid != worker.pid
    assert worker.wait(HANG) == -signal.SIGKILL
    assert f"process {hang.pid}," in Path(hang.stacks).read_text()
    os.kill(hang.pid, signal.SIGKILL)


def test_without_a_signal_a_hang_is_reported_and_nobody_killed(node: Node) -> None:
    worker = node.worker(
        "ask('soft', 0.1, number=0); sys.stdin.readline(); ask('soft', 0.1, number=0); time.sleep(300)"
    )
    assert node.hang().killed is None
    # While a hang is dealt with, others of the same worker are none.
    eventually(lambda: not node.watchdog._round.hung)
    worker.stdin.close()
    assert node.hang().killed is None
    assert worker.poll() is None


def test_whoever_is_no_worker_is_not_believed(node: Node) -> None:
    victim = node.process("print(flush=True); time.sleep(60)")
    victim.stdout.readline()
    worker = node.worker(
        f"""
        for pid in (1, {victim.pid}, {os.getpid()}, 99999999):
            ask('step', 0.05, pid=pid)
        print(flush=True)
        sys.stdin.readline()
        send(b'half a li')
        send(b'x' * 1000000 + b'\\n')
        send(os.urandom(10000))
        ask('own', 0.5)
        time.sleep(60)
        """
    )
    eventually(lambda: node.watchdog.dropped == 4)
    worker.stdin.close()
    assert node.hang().scope == "own"
    assert victim.poll() is None
    assert node.watchdog.dropped > 4


def test_a_round_that_is_over_kills_nobody(node: Node) -> None:
    worker = node.worker("ask('step', 600); time.sleep(300)")
    eventually(lambda: node.watchdog._timers)
    node.watchdog.unwatch()
    assert not node.watchdog._timers
    other = node.process("ask('other', 0.1); time.sleep(300)")
    node.watchdog.watch([Watched(process.pid, 0, 0, 1, None) for process in (worker, other)])
    assert node.hang().worker.pid == other.pid
    assert node.hangs.empty()
    assert worker.poll() is None


def test_a_watchdog_that_stood_still_takes_nobody_for_hung(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = node.worker("ask('a', 600); print(flush=True); input(); ask('b', 0.01); time.sleep(300)")
    worker.stdout.readline()
    eventually(lambda: node.watchdog._timers)
    # As when the job is suspended for an hour: that clock goes on (clock_gettime(2)).
    monotonic = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: monotonic() + 3600, time=time.time)
    monkeypatch.setattr(watchdog, "time", clock)
    node.watchdog.wake()
    eventually(lambda: node.watchdog.age() < 3600)
    worker.stdin.write(b"\n")
    worker.stdin.flush()
    assert node.hang().scope == "b"


def test_a_client_that_holds_the_pipe_open_holds_nobody_up(node: Node) -> None:
    node.worker("fd = os.open(sys.argv[1], os.O_WRONLY); os.write(fd, b'{'); ask('step', 0.1); time.sleep(60)")
    assert node.hang().scope == "step"


def test_requests_that_come_before_the_workers_are_known_count(node: Node) -> None:
    process = node.process("ask('early', 0.1); print(flush=True); time.sleep(60)")
    process.stdout.readline()
    eventually(lambda: any(timer.expires <= time.monotonic() for timer in node.watchdog._timers.values()))
    node.watchdog.watch([Watched(process.pid, 0, 0, 0, None)])
    assert node.hang().scope == "early"
