"""How workers end, and that nothing of theirs outlives them, their round or their agent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.agent.forkserver.linux import children
from tests.local.forkserver.helpers.workplace import HANG, Workplace, result_of
from tests.local.waiting import eventually

Make = Callable[..., Workplace]
COLD = {"TORCH_COLD": "1"}

FAMILY = """
import os, subprocess, sys, time

def note(kind, pid):
    with open(os.environ["PIDS"], "a") as file:
        print(kind, pid, file=file)

note("worker", os.getpid())
note("child", subprocess.Popen(["sleep", "1000"]).pid)
note("group", subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp).pid)
note("session", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("daemon", os.getpid())
        time.sleep(1000)
    os._exit(0)
os.wait()
note("ready", 0)
"""
WAIT = FAMILY + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n"


class Pids:
    """The processes of a family, as it wrote them down."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.environment = {"PIDS": str(file)}

    def wait(self, families: int = 1) -> dict[str, int]:
        """By kind, once all_pids is there."""
        # Nobody waits for the daemon, so it may write itself down after the others are ready.
        eventually(lambda: min(self._written().count(word) for word in ("ready 0\n", "daemon ")) >= families)
        found = dict(line.split() for line in self._written().splitlines())
        return {kind: int(pid) for kind, pid in found.items() if kind != "ready"}

    def kill(self) -> None:
        """End what is left of them. A process id may be somebody else's by now, but not with this environment."""
        for line in self._written().splitlines():
            pid = int(line.split()[1])
            with contextlib.suppress(OSError):
                if f"PIDS={self.file}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _written(self) -> str:
        text = self.file.read_text() if self.file.exists() else ""
        # Whole lines.
        return text[: text.rfind("\n") + 1]


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Pids]:
    """Where a family writes itself down; kills what is left of it."""
    made = Pids(tmp_path / "pids")
    yield made
    made.kill()


def assert_gone(*gone: int) -> None:
    alive = []
    for pid in gone:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            if not select.select([handle], [], [], HANG)[0]:
                alive.append(Path(f"/proc/{pid}/cmdline").read_bytes())
                os.kill(pid, signal.SIGKILL)
            os.close(handle)
    assert not alive


def is_alive(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    alive = not select.select([handle], [], [], 0)[0]
    os.close(handle)
    return alive


@pytest.mark.parametrize("environment", [{}, COLD], ids=["warm", "cold"])
def test_nothing_outlives_a_round(place: Workplace, pids: Pids, environment: dict[str, str]) -> None:
    place.script.write_text(FAMILY + "sys.exit(3)\n")
    context = place.context(environment={**environment, **pids.environment})
    assert select.select(context.exit_fds(), [], [], HANG)[0]
    result = result_of(context)
    assert result.failures[0].exitcode == 3
    family = pids.wait()
    assert is_alive(family["child"])
    assert is_alive(family["daemon"])
    context.close()
    assert_gone(*family.values())
    assert place.left() == []


@pytest.mark.parametrize("environment", [{}, COLD], ids=["warm", "cold"])
def test_worker_may_end_in_peace(place: Workplace, environment: dict[str, str]) -> None:
    place.script.write_text(
        # No threading.Event: a handler that runs just before the wait would wait for a lock of its own thread.
        "import signal, time\n"
        "signals = []\n"
        "signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))\n"
        "print('ready')\n"
        "while not signals:\n    time.sleep(0.01)\n"
        "print('saved')\n"
    )
    with place.running(environment=environment) as context:
        eventually(lambda: Path(context.stdouts[0]).read_text() == "ready\n")
        assert not context.all_ended()
        context.close(signal.SIGTERM, int(HANG))
    assert Path(context.stdouts[0]).read_text() == "ready\nsaved\n"
    assert context.exits() == {0: 0}


def test_worker_that_does_not_want_to_end_is_killed(place: Workplace) -> None:
    place.script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\ntime.sleep(1000)\n"
    )
    with place.running() as context:
        eventually(lambda: Path(context.stdouts[0]).read_text() == "ready\n")
        context.signal(signal.SIGTERM)
        context.close(signal.SIGTERM, 0)
    assert context.exits() == {0: -signal.SIGKILL}


def test_orphans_that_end_leave_no_zombies(place: Workplace) -> None:
    place.script.write_text(
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(0.05)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "print('ready')\n"
        "time.sleep(1000)\n"
    )
    with place.running() as context:
        is_ready = Path(context.stdouts[0]).read_text
        eventually(lambda: is_ready() == "ready\n" and len(place.left()) <= 1, lambda: str(place.left()))


def test_torn_error_file_is_no_error_of_the_agent(place: Workplace) -> None:
    place.script.write_text(
        "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"mess')\nos._exit(5)\n"
    )
    with place.running() as context:
        result = result_of(context)
        assert result.failures[0].exitcode == 5


ENDING = """\
import sys, helper, torch

class Thing:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        try:
            import torch
        except ImportError:
            print(self.name, "cannot import")
        else:
            print(self.name, "finds", torch.__name__)

torch.of_an_inherited_module = Thing("inherited")
in_a_cycle = Thing("cycle")
in_a_cycle.itself = in_a_cycle
del in_a_cycle
unflushed = open(sys.argv[1], "w")
unflushed.write("flushed")
torch.function_of_a_module_of_the_script = helper.function
"""
HELPER = """\
import sys

unflushed = open(sys.argv[1] + ".helper", "w")
unflushed.write("flushed, too")

def function():
    return unflushed
"""


def test_a_worker_ends_its_own_modules_and_not_those_of_the_fork_server(workplace: Make, tmp_path: Path) -> None:
    place = workplace()
    place.script.write_text(ENDING)
    place.script.with_name("helper.py").write_text(HELPER)
    file, helpers = tmp_path / "file", tmp_path / "file.helper"

    assert place.run_plain([str(file)]).stdout == "cycle finds torch\ninherited cannot import\n"
    file.unlink()
    helpers.unlink()

    ended = place.run_warm([str(file)])

    assert ended.stdout == "cycle finds torch\n"
    assert (ended.code, ended.stderr, file.read_text()) == (0, "", "flushed")
    assert helpers.read_text() == "flushed, too"


def start_agent(directory: Path, script: str, workers: int = 2, **options: Any) -> multiprocessing.Process:
    """An agent as a process of its own, to be killed."""
    (directory / "train.py").write_text(script)

    def main() -> None:
        place = Workplace(directory, **options)
        if workers:
            place.context(environment={"PIDS": str(directory / "pids")}, workers=workers)
        time.sleep(1000)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_nothing_outlives_the_agent(tmp_path: Path, pids: Pids, warm: bool) -> None:
    agent = start_agent(tmp_path, WAIT, warm=warm)
    try:
        family = pids.wait(families=2)
        warm = children(agent.pid)
        all_pids = [int(line.split()[1]) for line in pids.file.read_text().splitlines() if "ready" not in line]
    finally:
        agent.kill()
        agent.join()
    assert warm
    assert_gone(*warm, *all_pids)
    assert family


def test_workers_die_when_agent_and_fork_server_are_killed_at_once(tmp_path: Path, pids: Pids) -> None:
    agent = start_agent(tmp_path, WAIT)
    try:
        family = pids.wait(families=2)
        # Two for the moment in which a replacement takes over.
        warm = children(agent.pid)
        for pid in warm:
            os.kill(pid, signal.SIGSTOP)
    finally:
        agent.kill()
        agent.join()
    for pid in warm:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert_gone(*warm, family["worker"])


def test_fork_server_that_imports_dies_with_the_agent(tmp_path: Path) -> None:
    slow = f"import time\nopen({str(tmp_path / 'here')!r}, 'w')\ntime.sleep(1000)\n"
    agent = start_agent(tmp_path, "", workers=0, preload=["slow"], modules={"slow": slow})
    try:
        eventually((tmp_path / "here").exists)
        found = children(agent.pid)
    finally:
        agent.kill()
        agent.join()
    assert_gone(*found)


def test_workers_die_with_the_fork_server_and_start_cold_then(
    workplace: Make, pids: Pids, caplog: pytest.LogCaptureFixture
) -> None:
    place = workplace()
    place.script.write_text(WAIT)
    context = place.context(environment={**pids.environment, "SLURM_ELASTIC_ROUND": "0"})
    family = pids.wait()
    dead = place.fork_server.pid
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as own:
        os.kill(dead, signal.SIGKILL)
        result = result_of(context)
        assert result.failures[0].exitcode == -signal.SIGKILL
        assert_gone(*family.values())
        assert own.poll() is None
        own.kill()
    context.close()
    place.script.write_text("import sys\nprint('torch' in sys.modules)\n")
    for _round in range(2):
        assert place.run_warm().stdout == "False\n"
    assert caplog.messages == ["workers start cold: the fork server died (SIGKILL)"] * 2
    assert place.fork_server.pid != dead


def test_what_is_to_replace_a_fork_server_ends_with_it_when_it_is_killed(workplace: Make) -> None:
    place = workplace(modules={"slow": "import time\ntime.sleep(1000)\n"}, preload=["slow"])
    place.script.write_text("import sys\nprint('torch' in sys.modules)\n")
    (pid,) = eventually(lambda: children(place.fork_server.pid))
    os.kill(place.fork_server.pid, signal.SIGKILL)
    assert place.run_warm().stdout == "False\n"
    assert_gone(pid)


def test_signals_of_slurm_do_not_end_the_fork_server(workplace: Make) -> None:
    """slurmstepd signals every process of a step (scancel(1))."""
    place = workplace()
    place.script.write_text("import sys\nprint('torch' in sys.modules)\n")
    for _moment in ("while it starts", "when it serves"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            os.kill(place.fork_server.pid, number)
        assert place.run_warm().stdout == "True\n"


REGISTERING = """\
import ctypes

_libc = ctypes.CDLL(None)
_streams = ctypes.CDLL("libstdc++.so.6")

def register(text):
    kept.append(text)
    _libc.__cxa_atexit(_libc.puts, text, None)

def buffer_cout(text):
    cout = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(_streams, "_ZSt4cout")))
    _streams._ZNSt8ios_base15sync_with_stdioEb(False)
    _streams._ZNSo5writeEPKcl(cout, text, ctypes.c_long(len(text)))

kept = []
register(b"handler of a preload")
"""
EXITING = """\
import sys, registering, torch

registering._libc.printf(b"printed, ")
registering.buffer_cout(b"streamed\\n")
registering.register(b"and handled")
sys.exit(7)
"""


def test_a_worker_runs_its_own_exit_handlers_and_not_those_of_the_fork_server(
    workplace: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registering.py").write_text(REGISTERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = workplace(preload=["registering"])
    place.script.write_text(EXITING)

    plain = place.run_plain()
    assert (plain.code, "handler of a preload" in plain.stdout) == (7, True)

    ended = place.run_warm()

    assert (ended.code, ended.stderr) == (7, "")
    assert sorted(ended.stdout.splitlines()) == ["printed, and handled", "streamed"]


OWNED_GROUP = """\
import os, sys, torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel

# gloo's thread gets the GIL only where this thread gives it away.
sys.setswitchinterval(1000)

def main():
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    for _step in range(5):
        model(torch.ones(4, 20)).sum().backward()
    torch.distributed.destroy_process_group()

main()
print("done")
"""


def test_a_worker_ends_whose_model_owns_the_process_group_last(workplace: Make, tmp_path: Path) -> None:
    """torch's Reducer waits for gloo's thread while it holds the GIL (torch 2.13): most rounds of a cold start hang."""
    place = workplace(preload=["torch._dynamo"], with_torch=True)
    place.script.write_text(OWNED_GROUP)
    for number in range(6):
        with place.running([str(tmp_path / f"store{number}")], workers=2) as context:
            result_of(context, HANG / 4)
            assert [Path(context.stdouts[rank]).read_text() for rank in range(2)] == ["done\n"] * 2
