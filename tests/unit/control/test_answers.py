"""What a worker answers its agent, and how it measures its time."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.control import answers
from slurm_elastic.control import shared_page as page
from slurm_elastic.control.agent_side import RoundControl, TimeUse
from slurm_elastic.control.worker_side import SWITCH, VARIABLE, WorkerControl, attach
from tests.local.waiting import eventually

SITE = "/site-packages/"
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
C10D = ("torch/distributed/distributed_c10d.py", "all_reduce")
RECORD = ("torch/distributed/elastic/multiprocessing/errors/__init__.py", "wrapper")
FSDP = ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce")
OPS = ("torch/_ops.py", "__call__")
SCRIPT = ("train.py", "main")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([SCRIPT], False),
        ([SCRIPT, BACKWARD], True),
        ([SCRIPT, C10D], True),
        ([SCRIPT, FSDP, OPS], True),
        ([SCRIPT, BACKWARD, ("hook.py", "hook")], False),
        ([RECORD, SCRIPT], False),
        ([SCRIPT, RECORD], False),
        ([("torch/nn/parallel/distributed.py", "forward"), ("model.py", "forward")], False),
    ],
)
def test_a_stack_is_in_a_collective(calls: list[tuple[str, str]], expected: bool) -> None:
    stack = [(SITE + path, "1", name) for path, name in reversed(calls)]
    assert answers.is_in_collective(stack) is expected


def test_a_stack_is_found_among_those_that_python_writes() -> None:
    other = threading.Event()
    thread = threading.Thread(target=other.wait)
    thread.start()
    try:
        stacks = answers._stacks()
    finally:
        other.set()
        thread.join()
    (path, _, name), *_ = answers.stack_of(stacks, threading.get_ident())
    assert (Path(path).name, name) == ("answers.py", "_stacks")
    assert (__file__, "test_a_stack_is_found_among_those_that_python_writes") in [
        (path, name) for path, _, name in answers.stack_of(stacks, threading.get_ident())
    ]
    assert answers.stack_of(stacks, thread.ident or 0)[0][2] == "wait"
    assert answers.stack_of(stacks, 1) == []


def test_a_file_of_the_script_with_such_a_name_is_its_own() -> None:
    assert answers._is_collective("/home/u/distributed/train.py", "all_reduce") is False


@pytest.mark.parametrize(("place", "function"), [(place, function) for place, function, _ in answers.PLACES])
def test_the_places_are_there_in_this_release(place: str, function: str) -> None:
    package, _, rest = place.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / rest
    assert path.is_dir() if place.endswith("/") else path.is_file()
    if function:
        assert function in {
            node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
        }


ENTRY = {"collective_seq_id": 7, "is_p2p": False, "process_group": ["0"], "profiling_name": "gloo:barrier"}


@pytest.fixture
def control(tmp_path: Path) -> RoundControl:
    return RoundControl(tmp_path / "pages", 0, 1)


@pytest.fixture
def worker(control: RoundControl) -> WorkerControl:
    worker = attach(control.environment(0))
    assert worker is not None
    return worker


@pytest.fixture
def thread(control: RoundControl, worker: WorkerControl) -> Iterator[Callable[[dict[str, Any], str], None]]:
    """Has a thread answer while it is in a function: `begin` returns when it is there, by names and the function's."""
    inside, over = threading.Lock(), threading.Lock()
    threads = []

    def begin(names: dict[str, Any], name: str) -> None:
        def run() -> None:
            answers.start(control._pages[0])
            names[name]()

        # Methods of locks are no frames: while they run, the function is the innermost one.
        names.update(enter=inside.release, wait=over.acquire)
        inside.acquire()
        over.acquire()
        threads.append(threading.Thread(target=run))
        threads[0].start()
        inside.acquire()

    yield begin
    over.release()
    for thread in threads:
        thread.join()


def add_function(names: dict[str, Any], place: tuple[str, str], calls: str = "enter(), wait()") -> None:
    exec(compile(f"def {place[1]}():\n    {calls}", place[0], "exec"), names)


@pytest.mark.parametrize("functions", ["as they are", "changed"])
def test_a_worker_in_a_collective_says_where_it_is_when_it_is_asked(
    control: RoundControl,
    thread: Callable[[dict[str, Any], str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    functions: str,
) -> None:
    dump = json.dumps({"entries": [ENTRY]}).encode()
    monkeypatch.setattr(answers, "dumps", lambda: {"f.json": dump} if functions == "as they are" else 1 / 0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    names: dict[str, Any] = {}
    add_function(names, (SITE + C10D[0], C10D[1]))
    add_function(names, (str(tmp_path / "train.py"), "train"), f"{C10D[1]}()")
    thread(names, "train")
    (before,) = control.progress()
    assert (before.answers, before.in_collective, before.place, before.collectives) == (True, None, "", ())
    assert not list(tmp_path.glob("*.*"))
    control.ask_workers()
    control.await_answers(60)
    (progress,) = control.progress()
    assert (progress.in_collective, progress.place) == (True, "train.py:2 in train")
    assert progress.collectives == ((("0", 7, "barrier"),) if functions == "as they are" else ())
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.count("== Python, process ") == 1
    assert "in collective" not in stacks
    assert (tmp_path / "f.json").exists() is (functions == "as they are")


def test_a_place_is_told_before_a_full_recorder_is_read(
    control: RoundControl, thread: Callable[[dict[str, Any], str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    monkeypatch.setattr(answers, "dumps", lambda: read.wait(60) and {})
    names: dict[str, Any] = {}
    add_function(names, (SITE + C10D[0], C10D[1]))
    thread(names, C10D[1])
    control.ask_workers()
    try:
        eventually(lambda: control.progress()[0].in_collective)
    finally:
        read.set()


def test_a_worker_without_a_descriptor_does_not_know_where_it_is(
    control: RoundControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> int:
        raise OSError(errno.EMFILE, name)

    monkeypatch.setattr(os, "memfd_create", fail)
    control._pages[0][page.ANSWERER] = 1
    control.ask_workers()
    stacks = answers._stacks()
    answers.Answerer(control._pages[0], 1).answer(answers.stack_of(stacks, 1), 1, stacks)
    (progress,) = control.progress()
    assert (stacks, progress.in_collective, progress.place) == ("", None, "")


def test_an_answer_counts_for_a_while_and_a_worker_without_one_is_in_no_collective(control: RoundControl) -> None:
    fields = control._pages[0]
    control.ask_workers()
    assert control.progress()[0].in_collective is None, "nothing there answers"
    fields[page.ANSWERER] = 1
    assert control.progress()[0].in_collective is False, "it keeps Python's lock"
    fields[page.ANSWERED] = 1
    for here, expected in ((1, True), (0, False), (page.NONE, None)):
        fields[page.IN_COLLECTIVE] = here
        assert control.progress()[0].in_collective is expected
    fields[page.IN_COLLECTIVE] = 1
    control._asked_at = time.monotonic() - 20
    assert control.progress()[0].in_collective is None
    fields[page.ANSWERED] = page.LAST_ANSWER
    assert control.progress()[0].in_collective is True, "it has ended since"


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def used(control: RoundControl, worker: WorkerControl, work: Callable[[], object]) -> TimeUse:
    """Return the use of the time between two steps, of this work and of sleep for 0.25 s."""
    worker.measure()
    worker.ask(1)
    work()
    time.sleep(0.25)
    worker.ask(2)
    (progress,) = control.progress()
    assert progress.since_first is not None
    return progress.since_first


def test_a_thread_that_sleeps_waits_and_one_that_works_or_loads_does_not(
    control: RoundControl, worker: WorkerControl
) -> None:
    def work() -> None:
        spin(0.2)
        begin = time.monotonic()
        with worker.time_counts("loading"):
            time.sleep(0.1)
        spent.append(time.monotonic() - begin)
        with worker.time_counts("restoring"), worker.time_counts("loading"):
            time.sleep(0.3)

    spent: list[float] = []
    use = used(control, worker, work)
    assert use.waiting == pytest.approx(0.25, abs=0.08)
    assert 0.1 <= use.loading <= spent[0], "a block within a block does not count"
    assert use.restoring >= 0.3


def test_what_a_worker_does_from_a_step_to_the_report_of_a_checkpoint_is_saving(
    control: RoundControl, worker: WorkerControl
) -> None:
    def save() -> None:
        time.sleep(0.2)
        worker.report_checkpoint(1)
        spent.append(time.monotonic() - begin)

    spent: list[float] = []
    begin = time.monotonic()
    use = used(control, worker, save)
    assert use.waiting == pytest.approx(0.25, abs=0.08)
    assert 0.2 <= use.saving <= spent[0]
    assert control.progress()[0].save_time == use.saving


def test_on_a_gpu_waiting_is_unknown(
    control: RoundControl, worker: WorkerControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cuda:
        is_initialized = staticmethod(lambda: True)

    monkeypatch.setitem(sys.modules, "torch.cuda", Cuda())
    assert used(control, worker, lambda: None).waiting is None


def test_an_agent_reads_the_time_before_and_since_the_first_step(control: RoundControl, worker: WorkerControl) -> None:
    fields = control._pages[0]
    (progress,) = control.progress()
    assert (progress.before_first, progress.since_first) == (None, None)
    for field, seconds in zip((page.MEASURED, *page.USES), (5, 1, 2, 0, 3), strict=True):
        fields[field] = int(seconds * 1e9)
    (progress,) = control.progress()
    assert (progress.before_first, progress.since_first) == (TimeUse(1, 2, 0, 3), None)
    worker.ask(1)
    for field, seconds in zip((page.MEASURED, *page.USES), (9, 2, 2.5, 1, 3), strict=True):
        fields[field] = int(seconds * 1e9)
    (progress,) = control.progress()
    assert (progress.before_first, progress.since_first) == (TimeUse(1, 2, 0, 3), TimeUse(1, 0.5, 1, 0))
    fields[page.WAITING] = page.NONE
    assert control.progress()[0].since_first == TimeUse(None, 0.5, 1, 0)


@pytest.mark.parametrize(("switch", "measured"), [("", True), ("off", False)])
def test_the_measurement_can_be_turned_off(
    control: RoundControl, worker: WorkerControl, monkeypatch: pytest.MonkeyPatch, switch: str, measured: bool
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    # In a thread that ends: its process goes on, and the one that answers, too.
    thread = threading.Thread(target=worker.measure)
    thread.start()
    thread.join()
    (progress,) = control.progress()
    assert (progress.before_first is not None, progress.answers) == (measured, measured)
    control.ask_workers()
    control.await_answers(60)


def run(script: str, **environment: str) -> str:
    """Return the output of a script in a process of its own."""
    environment["PYTHONPATH"] = ":".join(sys.path)
    # torch's own warning, where there is none.
    warnings = ("-W", "error", "-W", "ignore:Failed to initialize NumPy")
    command = [sys.executable, *warnings, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_process_forks_without_the_thread() -> None:
    script = """
import os
from slurm_elastic.control.answers import start

def threads():
    return len(os.listdir("/proc/self/task"))

at_forks = []
# Called after those of later registrations.
os.register_at_fork(before=lambda: at_forks.append(threads()))
start([0] * 128)
for _ in range(3):
    child = os.fork()
    if not child:
        if not os.fork():
            os._exit(0)
        os._exit(threads() - 1)
    assert os.waitpid(child, 0)[1] == 0 and threads() == 2
print(at_forks)
"""
    assert run(script) == "[1, 1, 1]\n"


def test_the_worker_answers_before_its_script_attaches_and_a_program_that_it_starts_instead(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 2)
    attaching = "import os; from slurm_elastic import trainer; assert trainer.is_managed(); print(os.getpid())"
    before = f"""
import os, subprocess, sys, time
from slurm_elastic.control.answers import start_answering

def threads():
    return len(os.listdir("/proc/self/task"))

start_answering(os.environ)
assert threads() == 2
if os.environ["HOW"] == "itself":
    exec({attaching!r})
    assert threads() == 2
else:
    subprocess.run([sys.executable, "-c", {attaching!r}], check=True)
    while threads() > 1:
        time.sleep(0.01)
"""
    for local_rank, how in enumerate(("itself", "a program")):
        pid = run(before, HOW=how, **control.environment(local_rank))
        assert control._pages[local_rank][page.ANSWERER] == int(pid)
        progress = control.progress()[local_rank]
        assert (progress.attached, progress.answers) == (True, True)


def test_without_a_control_page_no_thread_answers(tmp_path: Path) -> None:
    script = """
import os
from slurm_elastic.control.answers import start_answering
start_answering(os.environ)
print(len(os.listdir("/proc/self/task")))
"""
    (tmp_path / "none").write_text("no page")
    for environment in ({}, {VARIABLE: str(tmp_path / "missing")}, {VARIABLE: str(tmp_path / "none")}):
        assert run(script, **environment) == "1\n"


def test_a_script_that_ends_while_a_dump_is_made_ends_as_without_it(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    script = """
import threading
import torch
from slurm_elastic.control import answers
from slurm_elastic.control.worker_side import attach
control, begun = attach(__import__("os").environ), threading.Event()

def dumps():
    begun.set()
    # A function in C++ that releases Python's lock for about 0.2 s, as that of a full flight recorder does.
    torch.mm(numbers, numbers)
    return {}

numbers = torch.ones(1500, 1500)
answers.dumps = dumps
control.measure()
control._fields[answers.page.ASKED] = 1
begun.wait()
"""
    assert run(script, OMP_NUM_THREADS="1", **control.environment(0)) == ""
