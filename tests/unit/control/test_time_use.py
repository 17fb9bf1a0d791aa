"""The use of a worker's time: which functions count as what, and what a real thread is found to do."""

from __future__ import annotations

import _thread
import ast
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from slurm_elastic.control import RoundControl, TimeUse, _time_use, attach
from slurm_elastic.control._shared_page import (
    COLLECTIVES,
    COLLECTIVES_FIELDS,
    DUMP,
    DUMPED,
    IN_COLLECTIVE,
    IN_COLLECTIVE_TIME,
    NONE,
    PLACE,
    SAMPLED,
    SAMPLER,
    USES,
    read_text,
)
from slurm_elastic.control._worker_side import VARIABLE

SITE = "/site-packages/"
FRAMEWORKS = Path("/opt/slurm-elastic/frameworks")
DATALOADER = ("torch/utils/data/dataloader.py", "__next__")
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
C10D = ("torch/distributed/distributed_c10d.py", "all_reduce")
SAVE = ("torch/serialization.py", "save")
LOAD = ("torch/serialization.py", "load")
RECORD = ("torch/distributed/elastic/multiprocessing/errors/__init__.py", "wrapper")
FSDP = ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce")
OPS = ("torch/_ops.py", "__call__")
SCRIPT = ("train.py", "main")


def stack(*places: tuple[str, str]) -> FrameType:
    """Return the innermost frame of calls of functions with these files and names, the outermost first."""
    frames: list[FrameType] = []

    def innermost() -> None:
        import sys

        frame = sys._getframe(1)
        frames.append(frame)

    call: Callable[[], Any] = innermost
    for path, name in reversed(places):
        names: dict[str, Any] = {"call": call}
        exec(compile(f"def {name}():\n    call()", SITE + path, "exec"), names)
        call = names[name]
    call()
    return frames[0]


@pytest.mark.parametrize(
    ("calls", "use"),
    [
        ([SCRIPT], _time_use.OWN),
        ([SCRIPT, BACKWARD], _time_use.WAITING),
        ([SCRIPT, C10D], _time_use.WAITING),
        ([SCRIPT, FSDP, OPS], _time_use.WAITING),
        ([SCRIPT, BACKWARD, ("hook.py", "hook")], _time_use.OWN),
        ([RECORD, SCRIPT], _time_use.OWN),
        ([SCRIPT, RECORD], _time_use.OWN),
        ([("torch/nn/parallel/distributed.py", "forward"), ("model.py", "forward")], _time_use.OWN),
        ([SCRIPT, DATALOADER], _time_use.LOADING),
        ([SCRIPT, DATALOADER, ("dataset.py", "item"), LOAD], _time_use.LOADING),
        ([SCRIPT, ("slurm_elastic/trainer.py", "loading"), ("rows.py", "rows")], _time_use.LOADING),
        ([SCRIPT, SAVE], _time_use.SAVING),
        ([SCRIPT, LOAD], _time_use.RESTORING),
        ([SCRIPT, ("torch/distributed/checkpoint/state_dict_saver.py", "save"), C10D], _time_use.SAVING),
        ([SCRIPT, ("torch/distributed/checkpoint/state_dict_loader.py", "load"), C10D], _time_use.RESTORING),
    ],
)
def test_the_use_of_a_stack(calls: list[tuple[str, str]], use: int) -> None:
    assert _time_use.use_of_stack(stack(*calls)) == use


def test_a_file_of_the_script_with_such_a_name_is_its_own() -> None:
    assert _time_use.use_of_code("/home/u/distributed/train.py", "all_reduce") == _time_use.OWN
    assert _time_use.use_of_code("/home/u/mytorch/serialization.py", "save") == _time_use.OWN


@pytest.mark.parametrize(("place", "function"), [(place, function) for place, function, _ in _time_use.PLACES])
def test_the_places_are_there_in_this_release(place: str, function: str) -> None:
    package, _, rest = place.partition("/")
    found = importlib.util.find_spec(package)
    homes = [Path(found.origin).parent] if found is not None and found.origin is not None else []
    homes += FRAMEWORKS.glob(f"lib/python*/site-packages/{package}")
    if not homes:
        pytest.skip(f"{package} is not installed")
    path = homes[0] / rest
    assert path.is_dir() if place.endswith("/") else path.is_file()
    if function:
        tree = ast.parse(path.read_text())
        assert function in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


class Task:
    """A thread that runs a function, and its sampler."""

    def __init__(self, fields: list[int], work: Callable[[], None]) -> None:
        self._over, started = threading.Event(), threading.Event()
        self.tasks: list[int] = []

        def run() -> None:
            self.tasks[:] = [_thread.get_ident(), _thread.get_native_id()]
            started.set()
            while not self._over.is_set():
                work()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        started.wait()
        self.sampler = _time_use.Sampler(fields, *self.tasks)

    def sample(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
            assert self.sampler.sample()

    def close(self) -> None:
        self._over.set()
        self.thread.join()


def function(place: tuple[str, str], **names: Any) -> Callable[[], None]:
    exec(compile(f"def {place[1]}():\n    work()", SITE + place[0], "exec"), names)
    found: Callable[[], None] = names[place[1]]
    return found


def used(place: tuple[str, str], work: Callable[[], object]) -> list[float]:
    """Return the share of the time of a thread for each use, which calls `work` in a function at this place."""
    fields = [0] * 128
    task = Task(fields, function(place, work=work))
    try:
        task.sample(0.4)
    finally:
        task.close()
    # Its directory in /proc is gone a moment after the thread is.
    end = time.monotonic() + 5
    while task.sampler.sample():
        assert time.monotonic() < end
    return [fields[use] / fields[SAMPLED] for use in USES]


def test_a_thread_that_sleeps_in_a_collective_waits() -> None:
    # One sleep for all looks: a thread that wants a processor again, and has to wait for it, is not asleep.
    waiting, *others = used(BACKWARD, partial(time.sleep, 0.5))
    assert waiting > 0.7
    assert others == [0, 0, 0]


def test_a_thread_that_works_in_a_collective_does_not_wait() -> None:
    # It waits for Python's lock while this thread has it, and for a processor; it sleeps for neither.
    waiting, *others = used(BACKWARD, partial(sum, range(3000)))
    assert waiting < 0.3
    assert others == [0, 0, 0]


def test_sleep_elsewhere_does_not_make_work_in_a_collective_a_wait() -> None:
    backward = function(BACKWARD, work=partial(sum, range(1_000_000)))
    sleep = function(SCRIPT, work=partial(time.sleep, 0.03))

    def both() -> None:
        backward()
        sleep()

    fields = [0] * 128
    task = Task(fields, both)
    task.sample(0.6)
    task.close()
    assert fields[USES[0]] / fields[SAMPLED] < 0.2


def test_all_time_in_a_data_loader_is_waiting_for_input() -> None:
    waiting, loading, *others = used(DATALOADER, partial(sum, range(3000)))
    assert loading > 0.7
    assert (waiting, others) == (0, [0, 0])


def test_on_a_gpu_waiting_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        is_initialized = staticmethod(lambda: True)

    monkeypatch.setitem(__import__("sys").modules, "torch.cuda", Cuda())
    fields = [0] * 128
    task = Task(fields, lambda: time.sleep(0.01))
    task.sample(0.05)
    task.close()
    assert fields[USES[0]] == NONE
    assert fields[SAMPLED] > 0


def test_a_thread_that_stays_in_a_collective_says_so_with_its_line(tmp_path: Path) -> None:
    fields = [0] * 128
    theirs, ours = os.pipe()
    # The others come when this end is closed.
    over = threading.Event()
    names: dict[str, Any] = {"collective": function(C10D, work=partial(os.read, theirs, 1)), "over": over.is_set}
    source = "def train():\n    collective()\n    while not over():\n        pass\n"
    exec(compile(source, str(tmp_path / "train.py"), "exec"), names)
    task = Task(fields, names["train"])
    try:
        task.sample(0.5)
        found = fields[IN_COLLECTIVE], read_text(fields, PLACE)
    finally:
        os.close(ours)
    task.sample(0.2)
    over.set()
    task.close()
    os.close(theirs)
    assert found == (1, "train.py:2 in train")
    # It has moved on. The interpreter lets others run at few places of a loop, so it may seem to stay at one of them.
    assert fields[IN_COLLECTIVE] == 0
    assert read_text(fields, PLACE) in ("", "train.py:3 in train")


def test_a_thread_that_stays_has_its_last_collectives_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"collective_seq_id": 7, "is_p2p": False, "process_group": ["0"], "profiling_name": "gloo:barrier"}
    monkeypatch.setattr(_time_use, "dumps", lambda: {"f": json.dumps({"entries": [entry]}).encode()})
    fields = [0] * 128
    theirs, ours = os.pipe()
    collective = function(C10D, work=partial(os.read, theirs, 1))

    def train() -> None:
        collective()
        time.sleep(0.003)
        time.sleep(0.003)

    task = Task(fields, train)
    try:
        task.sample(0.05)
        before = read_text(fields, COLLECTIVES, COLLECTIVES_FIELDS)
        task.sample(0.5)
        stays = read_text(fields, COLLECTIVES, COLLECTIVES_FIELDS)
    finally:
        os.close(ours)
    task.sample(0.5)
    task.close()
    os.close(theirs)
    assert (before, stays) == ("", '[["0",7,"barrier"]]')
    # It has moved on.
    assert read_text(fields, COLLECTIVES, COLLECTIVES_FIELDS) == ""


@pytest.mark.parametrize("functions", ["as they are", "changed"])
def test_a_dump_is_written_once_when_the_agent_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, functions: str
) -> None:
    if functions == "changed":
        monkeypatch.setattr(_time_use, "dumps", lambda: 1 / 0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    fields = [0] * 128
    task = Task(fields, lambda: time.sleep(0.01))
    task.sample(0.05)
    assert not list(tmp_path.iterdir())
    fields[DUMP] = 1
    task.sample(0.1)
    task.close()
    assert fields[DUMPED] == 1
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.count("== Python, process ") == 1
    assert f'File "{__file__}"' in stacks


@pytest.mark.parametrize(
    ("here", "age", "expected"), [(1, 0.0, True), (0, 0.0, False), (NONE, 0.0, None), (1, 60.0, False)]
)
def test_an_agent_reads_whether_a_worker_is_in_a_collective(
    here: int, age: float, expected: bool | None, tmp_path: Path
) -> None:
    control = RoundControl(tmp_path, 0, 1)
    assert control.progress()[0].in_collective is None
    fields = control._pages[0]
    fields[IN_COLLECTIVE], fields[IN_COLLECTIVE_TIME] = here, time.monotonic_ns() - int(age * 1e9)
    # Without samples for so long, it keeps Python's lock, and does not wait.
    assert control.progress()[0].in_collective is expected


def test_an_agent_reads_the_time_before_and_since_the_first_step(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    worker = attach(control.environment(0))
    assert worker is not None
    page = control._pages[0]
    (progress,) = control.progress()
    assert (progress.before_first, progress.since_first) == (None, None)
    for field, seconds in zip((SAMPLED, *USES), (5, 1, 2, 0, 3), strict=True):
        page[field] = int(seconds * 1e9)
    (progress,) = control.progress()
    assert (progress.before_first, progress.since_first) == (TimeUse(1, 2, 0, 3), None)
    worker.ask(1)
    for field, seconds in zip((SAMPLED, *USES), (9, 2, 2.5, 1, 3), strict=True):
        page[field] = int(seconds * 1e9)
    (progress,) = control.progress()
    assert (progress.before_first, progress.since_first) == (TimeUse(1, 2, 0, 3), TimeUse(1, 0.5, 1, 0))
    page[USES[0]] = NONE
    assert control.progress()[0].since_first == TimeUse(None, 0.5, 1, 0)


@pytest.mark.parametrize(("switch", "measured"), [("", True), ("off", False)])
def test_the_measurement_can_be_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, measured: bool
) -> None:
    monkeypatch.setenv(_time_use.SWITCH, switch)
    control = RoundControl(tmp_path, 0, 1)
    worker = attach(control.environment(0))
    assert worker is not None
    # In a thread that ends: the sampler ends with it.
    thread = threading.Thread(target=worker.measure)
    thread.start()
    thread.join()
    assert (control.progress()[0].before_first is not None) is measured


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
from slurm_elastic.control._time_use import start

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


def test_the_worker_is_sampled_before_its_script_attaches_and_a_program_that_it_starts_instead(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 2)
    attaching = "import os; from slurm_elastic import trainer; assert trainer.is_managed(); print(os.getpid())"
    before = f"""
import os, subprocess, sys, time
from slurm_elastic.control._time_use import start_sampling

def threads():
    return len(os.listdir("/proc/self/task"))

start_sampling(os.environ)
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
        assert control._pages[local_rank][SAMPLER] == int(pid)
        progress = control.progress()[local_rank]
        assert progress.attached
        assert progress.before_first is not None


def test_without_a_control_page_nothing_is_sampled(tmp_path: Path) -> None:
    script = """
import os
from slurm_elastic.control._time_use import start_sampling
start_sampling(os.environ)
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
from slurm_elastic.control import _time_use, attach
control, begun = attach(__import__("os").environ), threading.Event()

def dumps():
    begun.set()
    # A function in C++ that releases Python's lock for about 0.2 s, as that of a full flight recorder does.
    torch.mm(numbers, numbers)
    return {}

numbers = torch.ones(1500, 1500)
_time_use.dumps = dumps
control.measure()
control._fields[_time_use.page.DUMP] = 1
begun.wait()
"""
    assert run(script, OMP_NUM_THREADS="1", **control.environment(0)) == ""
