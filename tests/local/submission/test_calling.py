"""What a worker of a function does with its submission, in processes without agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import utils

from slurm_elastic.control import RoundControl
from slurm_elastic.submission.payload import Checkpointing, read_ranks
from tests.local.agents import ROOT


class Counter:
    """A callable that submitit can checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, word: str) -> tuple[int, str]:
        return self.count, word

    def checkpoint(self, word: str) -> utils.DelayedSubmission:
        self.count += 1
        return submitit.helpers.DelayedSubmission(self, f"{word}+")


def _work(folder: Path, source: str, rank: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Submit what `source` calls `function`, and run one worker of it."""
    # Functions of the main module reach the workers by value.
    names = {"__name__": "__main__"}
    exec(source, names)
    utils.DelayedSubmission(names["function"]).dump(folder / "uid.pkl")
    base = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2", "SLURM_ELASTIC_NODE": "n2"}
    command = [sys.executable, "-m", "slurm_elastic.submission.worker", str(folder), "uid"]
    return subprocess.run(
        command, env={**base, "SLURM_ELASTIC_RUN_ID": "7", **environ}, capture_output=True, text=True, check=False
    )


def _value(folder: Path, rank: int) -> Any:
    return utils.pickle_load(folder / f"7_{rank}_result.pkl")


def test_result_lies_where_submitit_looks(tmp_path: Path) -> None:
    source = "import os\ndef function(): return os.environ['RANK'], os.environ['SUBMITIT_EXECUTOR']"
    done = _work(tmp_path, source)
    assert (done.returncode, done.stderr) == (0, "")
    assert _value(tmp_path, 0) == ("success", ("0", "elastic"))
    assert read_ranks(utils.JobPaths(tmp_path, job_id="7")) == 2


def test_module_that_the_nodes_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "modules/own.py").write_text("def function(): pass\n")
    done = _work(tmp_path, "from own import function")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("n2: the function cannot be loaded here: No module named 'own'; put its")


def test_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    done = _work(tmp_path, "import threading\ndef function(): return threading.Lock()", 1)
    assert done.returncode == 1
    assert "TypeError: what the function returned cannot be pickled: cannot pickle '_thread.lock'" in done.stderr
    assert not (tmp_path / "7_1_result.pkl").exists()


def test_stop_is_no_result(tmp_path: Path) -> None:
    """That a worker ends well because it was told to stop is not the end of the run."""
    (tmp_path / "control").mkdir()
    control = RoundControl(tmp_path / "control", 0, 1)

    def stop_once_it_asks() -> None:
        while (step := control.hold()) is None:
            time.sleep(0.01)
        control.stop_at(step, "preempted", None)

    agent = threading.Thread(target=stop_once_it_asks)
    agent.start()
    source = "def function():\n    from slurm_elastic import trainer\n    while not trainer.should_stop(): pass"
    done = _work(tmp_path, source, **control.environment(0))
    agent.join()
    assert (done.returncode, done.stderr) == (0, "")
    assert control.stopped()
    assert not (tmp_path / "7_0_result.pkl").exists()


def test_checkpoint_takes_the_place_of_the_submission(tmp_path: Path) -> None:
    submission = utils.DelayedSubmission(Counter(), "first")
    submission.set_timeout(60, 3)
    Checkpointing(submission, utils.JobPaths(tmp_path, job_id="7", task_id=1)).save()
    assert list(tmp_path.iterdir()) == []
    paths = utils.JobPaths(tmp_path, job_id="7", task_id=0)
    Checkpointing(submission, paths).save()
    following = utils.DelayedSubmission.load(paths.submitted_pickle)
    assert following.result() == (1, "first+")
    assert (following._timeout_min, following._timeout_countdown) == (60, 3)


def test_forked_process_of_the_function_saves_nothing(tmp_path: Path) -> None:
    paths = utils.JobPaths(tmp_path, job_id="7", task_id=0)
    checkpointing = Checkpointing(utils.DelayedSubmission(Counter(), "first"), paths)
    pid = os.fork()
    if pid == 0:
        checkpointing.handle(signal.SIGHUP, None)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGHUP], ids=str)
def test_signal_before_the_function_runs(tmp_path: Path, number: signal.Signals) -> None:
    """It comes while the submission is loaded: the warning of Slurm's is nothing, the agent's is no failure."""
    source = f"""
import os
class Function:
    def __call__(self): return "called"
    def checkpoint(self): raise AssertionError
    def __reduce__(self): return make, ()
def make():
    os.kill(os.getpid(), {int(number)})
    return Function()
function = Function()
"""
    done = _work(tmp_path, source)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "7_0_result.pkl").exists() == (number == signal.SIGUSR2)
