"""What a script imports is learned in its first round, and there when the workers of later ones are forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from slurm_elastic.agent.forkserver.linux import children
from slurm_elastic.agent.forkserver.worker_processes import WorkerProcesses
from tests.local.forkserver.helpers.workplace import Ended, Workplace, comparable, result_of
from tests.local.forkserver.test_ends import assert_gone
from tests.local.waiting import eventually

PACKAGES = {
    "plain": "import plain_part\nIMPORTED = 1\n",
    "plain_part": "",
    "before": "import os\nSEEN = os.environ.get('CHOICE')\n",
    "after": "import os\nSEEN = os.environ.get('CHOICE')\n",
    "typed": "import torch\nONE = torch.tensor(1.0).dtype\n",
    "draws": "import torch\nNUMBER = torch.rand(1).item()\n",
    "keeps": "import atexit, os, shutil, tempfile\nDIRECTORY = tempfile.mkdtemp()\n"
    "atexit.register(shutil.rmtree, DIRECTORY)\nOWNER = os.getpid()\n",
    "says": "import atexit\natexit.register(print, 'goodbye')\n",
    "ranked": "import os\nRANK = os.environ.get('RANK')\n",
    "copies": "import os\nSEEN = dict(os.environ).get('CHOICE')\n",
    "counts": "import torch\nTHERE = torch.cuda.is_available(), torch.cuda.device_count()\n",
    "stack": "import sys\nSTACK = []\nframe = sys._getframe(1)\n"
    "while frame:\n    STACK.append(frame.f_code.co_filename)\n    frame = frame.f_back\n",
    "raises": "1 / 0\n",
    # The kernel is told a thread's name since Python 3.14.
    "threaded": "import threading as t\nt.Thread(target=t.Event().wait, name='python', daemon=True).start()\n",
    "outer": "import plain, threaded\n",
}
AT_START = "import sys\nthere = [name for name in {names!r} if name in sys.modules]\n"


class Site:
    """A directory of installed packages, and a script that uses them."""

    def __init__(self, directory: Path) -> None:
        self.packages = directory / "site-packages"
        self.packages.mkdir()
        for name, source in PACKAGES.items():
            (self.packages / f"{name}.py").write_text(source)
        self.home, self.lists, self.directory = directory / "state", directory / "runs" / ".imports", directory
        self.environment = {**os.environ, "PYTHONPATH": str(self.packages), "XDG_STATE_HOME": str(self.home)}
        self.with_torch = False
        self.script = directory / "place" / "train.py"
        self.script.parent.mkdir()
        self.place: Workplace | None = None

    def start(self, script: str = "") -> Workplace:
        if self.place is not None:
            self.place.close()
        if script:
            self.script.write_text(script)
        self.place = self.work()
        return self.place

    def work(self, *, learns: bool = True) -> Workplace:
        """Start workers there."""
        imports = str(self.lists) if learns else None
        options = {"environment": self.environment, "with_torch": self.with_torch}
        return Workplace(self.script.parent, imports=imports, **options)

    def start_again(self) -> None:
        """Start it as a later run does, and wait for what an earlier one has learned.

        A start of workers waits for it for a limited time only, which a busy machine may exceed.
        """
        place = self.start()
        self.wait_takeover(place, place.fork_server.pid)

    def run(self, environment: Mapping[str, str] | None = None) -> Ended:
        assert self.place is not None
        ended = self.place.run_warm(environment=environment)
        assert ended.code == 0, ended.stderr
        return ended

    def run_plain(self) -> Ended:
        assert self.place is not None
        return self.place.run_plain()

    def learn(self, script: str, *, workers: int = 1) -> str:
        """Run the script and wait until what it has imported is there for the next round; return its output."""
        return self.learn_in(self.start(script), workers=workers)

    def learn_in(self, place: Workplace, *, workers: int = 1) -> str:
        context = place.context(workers=workers)
        try:
            result = result_of(context)
            assert not result.failures, Path(context.stderrs[0]).read_text()
        finally:
            self.close(place, context)
        return Path(context.stdouts[0]).read_text()

    def close(self, place: Workplace, context: WorkerProcesses) -> None:
        """End the round when the fork server has seen what was imported, and wait until that is there for the next."""
        server = place.fork_server.pid
        try:
            eventually(lambda: {*children(server)} - {*context.pids().values()})
        finally:
            context.close()
        self.wait_takeover(place, server)

    def wait_takeover(self, place: Workplace, server: int) -> None:
        def has_taken_over() -> bool:
            # As in an agent, which reads when the fork server has something to say.
            place.fork_server.read()
            return place.fork_server.pid != server

        eventually(has_taken_over)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    # As many batch scripts do.
    monkeypatch.setenv("MASTER_ADDR", "n1")
    made = Site(tmp_path)
    yield made
    if made.place is not None:
        made.place.close()


def asking(*names: str) -> str:
    return AT_START.format(names=names)


def test_imports_are_there_in_the_next_round_and_in_the_next_run(site: Site) -> None:
    script = asking("plain", "plain_part") + "import plain\nprint(there)\n"
    assert site.learn(script) == "[]\n"
    assert site.run().stdout == "['plain', 'plain_part']\n"
    site.start_again()
    assert site.run().stdout == "['plain', 'plain_part']\n"
    assert {file.stat().st_mode & 0o777 for file in site.lists.iterdir()} == {0o600}


def test_imports_are_learned_without_numpy(site: Site) -> None:
    """torch does not require numpy."""
    (site.packages / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    asked = asking("plain", "torch._dynamo")
    site.with_torch = True
    script = asked + "import plain, torch._dynamo\nprint(there, 'numpy' in sys.modules)\n"
    assert site.learn(script) == "[] False\n"
    assert site.run().stdout == "['plain', 'torch._dynamo'] False\n"


def test_nothing_of_the_script_is_looked_at(site: Site) -> None:
    site.with_torch = True
    script = asking("plain") + "import plain\n" + (Path(__file__).parent / "scripts" / "hostile.py").read_text()
    assert site.learn(f"{script}print(there)\n") == "done\n[]\n"
    ended = site.run()
    assert (ended.stdout, ended.stderr) == ("done\n['plain']\n", "")


ONCE = """\
import os
with open(__file__ + '.imported', 'a') as file:
    file.write(f'{os.getpid()}\\n')
"""


def test_next_attempt_has_what_has_come_since(site: Site) -> None:
    for name in ("early", "late"):
        (site.packages / f"{name}.py").write_text(ONCE)
    more = site.directory / "more"
    place = site.start(
        f"import os, early, time\nwhile not os.path.exists({str(more)!r}):\n    time.sleep(0.05)\n"
        "import late\ntime.sleep(1000)\n"
    )
    context = place.context()
    server, worker = place.fork_server.pid, context.pids()[0]

    def imported(name: str) -> list[int]:
        file = site.packages / f"{name}.py.imported"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    try:
        eventually(lambda: len(imported("early")) == 2)
        more.touch()
        eventually(lambda: len(imported("late")) == 2)
        found = imported("early")[1:]
        # The first one ends when the next one is ready.
        assert_gone(found[0])
    finally:
        context.close(signal.SIGKILL)
    site.wait_takeover(place, server)
    assert place.fork_server.pid == found[1]
    assert {name: imported(name) for name in ("early", "late")} == {
        "early": [worker, *found],
        "late": [worker, found[1]],
    }
    site.script.write_text(asking("early", "late") + "print(there)\n")
    assert site.run().stdout == "['early', 'late']\n"
    assert_gone(server)


ROWS = """\
import os, sys, torch, traceback
import after
torch.set_default_dtype(torch.float64)
import typed
torch.set_default_dtype(torch.float32)
print('default dtype', typed.ONE)
torch.manual_seed(3)
import draws
print('random numbers', draws.NUMBER, torch.rand(2))
import keeps
print('temporary directory', os.path.isdir(keeps.DIRECTORY), keeps.OWNER == os.getpid())
import says
import ranked
print('rank', ranked.RANK)
import copies
print('whole environment', copies.SEEN, os.environ['MASTER_ADDR'])
import counts
print('devices', counts.THERE, torch.cuda.device_count())
try:
    import raises
except ZeroDivisionError:
    print('failing import', traceback.format_exc())
import importlib._bootstrap as bootstrap
print('import system', sys.meta_path, sys.path_hooks, bootstrap._find_spec, bootstrap._find_spec.__code__.co_filename)
os.environ['CHOICE'] = 'mine'
import before
print('environment', after.SEEN, before.SEEN)
sys.path.insert(0, {more!r})
import elsewhere
print('path', elsewhere.__file__, sys.path)
"""
LEARNED = ["after", "says", "copies", "counts"]
if torch.version.cuda is not None and not Path("/proc/driver/nvidia").exists():
    # Without a driver to ask, torch counts devices by CUDA itself, which cannot be used after a fork (torch 2.15).
    LEARNED.remove("counts")
NOT_LEARNED = ["typed", "draws", "keeps", "ranked", "raises", "before", "elsewhere"]


def test_script_finds_what_a_cold_start_finds(site: Site) -> None:
    """In the round that learns, in the next one, and in the next run."""
    site.with_torch = True
    more = site.directory / "more"
    more.mkdir()
    (more / "elsewhere.py").write_text("")
    shown = asking(*LEARNED, *NOT_LEARNED) + "sys.stderr.write(str(there))\n"
    first = site.learn(shown + ROWS.replace("{more!r}", repr(str(more))))
    second, plain = site.run(), site.run_plain()
    site.start_again()
    third = site.run()
    assert second.stderr == third.stderr == str(LEARNED)
    for output in (first, second.stdout, third.stdout):
        shown = comparable(Ended(0, output, "", None)).stdout
        assert shown.splitlines() == comparable(plain).stdout.splitlines()
    assert "\ngoodbye" in plain.stdout


def test_nothing_of_ours_is_on_the_stack_of_an_import(site: Site) -> None:
    site.start("import stack\nprint(stack.STACK)\n")
    assert site.run() == site.run_plain()


def test_what_one_rank_imports_is_left_to_it(site: Site) -> None:
    script = asking("plain", "says") + "import os\nif os.environ['RANK'] == '0':\n    import says\nimport plain\n"
    site.learn(script + "print(there)\n", workers=2)
    assert site.run().stdout == "['plain']\ngoodbye\n"


def test_what_cannot_be_shared_is_left_out_with_what_imports_it(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slurm_elastic")
    site.learn(asking("outer", "plain", "threaded", "after") + "import outer, after\nprint(there)\n")
    assert site.run().stdout == "['plain', 'after']\n"
    assert "each worker imports threaded, outer itself: importing it starts a thread (python)" in caplog.messages
    caplog.clear()
    site.start_again()
    assert site.run().stdout == "['plain', 'after']\n"
    assert not caplog.messages


THREADED_IF = """\
import os, threading as t
if os.path.exists({file!r}):
    t.Thread(target=t.Event().wait, name='python', daemon=True).start()
"""


def test_a_module_that_begins_to_start_a_thread_is_found_in_a_later_run(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A later run checks the whole list, and each module only if it has left something."""
    caplog.set_level("INFO", "slurm_elastic")
    chosen = site.directory / "chosen"
    (site.packages / "changing.py").write_text(THREADED_IF.format(file=str(chosen)))
    (site.packages / "wide.py").write_text("import plain, changing\n")
    site.learn(asking("wide", "plain", "changing", "after") + "import wide, after\nprint(there)\n")
    site.start_again()
    assert site.run().stdout == "['wide', 'plain', 'changing', 'after']\n"
    chosen.touch()
    site.start_again()
    assert site.run().stdout == "['plain', 'after']\n"
    assert "each worker imports changing, wide itself: importing it starts a thread (python)" in caplog.messages


MULTIPLIES = """\
import numpy
SQUARE = numpy.ones((500, 500)) @ numpy.ones((500, 500))
"""


def test_a_thread_is_found_after_others_have_ended(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """OpenBLAS's threads are still running after a product, and end when the replacement looks at them (a fork)."""
    site.with_torch = True
    pytest.importorskip("numpy")
    caplog.set_level("INFO", "slurm_elastic")
    site.environment["OPENBLAS_NUM_THREADS"] = "2"
    (site.packages / "multiplies.py").write_text(MULTIPLIES)
    site.learn(asking("multiplies", "threaded") + "import multiplies, threaded\nprint(there)\n")
    assert site.run().stdout == "['multiplies']\n"
    assert "each worker imports threaded itself: importing it starts a thread (python)" in caplog.messages


def test_package_that_is_replaced_between_rounds(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.learn("import plain\nprint(plain.IMPORTED)\n")
    assert site.run().stdout == "1\n"
    new = site.packages / "new.py"
    new.write_text("IMPORTED = 22\n")
    new.replace(site.packages / "plain.py")
    assert site.run().stdout == "22\n"
    changed = f"{site.packages} has changed since modules were imported: they are imported anew"
    assert [message for message in caplog.messages if "changed" in message] == [changed]


NOTES_SCORE = """\
with open('/proc/self/oom_score_adj') as score, open({file!r}, 'a') as file:
    file.write(score.read())
"""


def test_script_that_imports_something_else_in_the_next_round(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    asked = asking("plain", "after")
    place = site.start(asked + "import plain\nprint(there)\n")
    server = place.fork_server.pid
    site.learn_in(place)
    site.script.write_text(asked + "import after\nprint(there, after.SEEN)\n")
    assert site.run({"CHOICE": "given"}).stdout == "['plain'] given\n"
    assert not [message for message in caplog.messages if "changed" in message]
    assert_gone(server)


@pytest.mark.parametrize("later", ["round", "run"])
def test_script_that_sets_something_else_before_an_import(
    site: Site, caplog: pytest.LogCaptureFixture, later: str
) -> None:
    script = (
        asking("before") + "import os, plain\nos.environ['CHOICE'] = 'one'\nimport before\nprint(there, before.SEEN)\n"
    )
    assert site.learn(script) == "[] one\n"
    site.script.write_text(script.replace("one", "another"))
    if later == "run":
        site.start()
    assert site.run().stdout == "[] another\n"
    told = [message for message in caplog.messages if "changed" in message]
    changed = f"{site.script} has changed since modules were imported: they are imported anew"
    assert told == ([changed] if later == "round" else [])


def test_the_process_that_imports_is_killed_first_if_memory_runs_out(site: Site) -> None:
    scores = site.directory / "scores"
    (site.packages / "noting.py").write_text(NOTES_SCORE.format(file=str(scores)))
    script = asking("noting") + "import noting\nprint(there, open('/proc/self/oom_score_adj').read())\n"
    own = Path("/proc/self/oom_score_adj").read_text()
    assert site.learn(script) == f"[] {own}\n"
    assert site.run().stdout == f"['noting'] {own}\n"
    assert scores.read_text() == f"{own}1000\n"


def test_torn_list_is_told_and_written_anew(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slurm_elastic")
    script = asking("plain") + "import plain\nprint(there)\n"
    site.learn(script)
    (file,) = site.lists.glob("*.json")
    file.write_bytes(file.read_bytes()[:-20])
    site.learn(script)
    assert site.run().stdout == "['plain']\n"
    assert f"learned imports are not used: {file} is damaged or was not written by this user; remove it" in caplog.text


def test_a_killed_worker_has_reported(site: Site) -> None:
    script = asking("plain") + "import plain, os\nprint(there)\nos.path.exists('/tmp') and None\n"
    place = site.start(script + "if not there:\n    import time\n    time.sleep(1000)\n")
    context = place.context()
    eventually(lambda: "[]" in Path(context.stdouts[0]).read_text())
    os.kill(context.pids()[0], signal.SIGKILL)
    result_of(context)
    site.close(place, context)
    assert site.run().stdout == "['plain']\n"


def test_an_encoding_is_not_worth_a_replacement(site: Site) -> None:
    script = asking("plain", "encodings.cp037") + "import plain\nb'a'.decode('cp037')\nprint(there)\n"
    assert site.learn(script) == "[]\n"
    assert site.run().stdout == "['plain']\n"


def test_nothing_is_learned_where_that_is_switched_off(site: Site) -> None:
    site.script.write_text(asking("plain") + "import plain\nprint(there)\n")
    site.place = site.work(learns=False)
    assert site.run().stdout == "[]\n"
    assert site.run().stdout == "[]\n"
    assert not site.lists.exists()
