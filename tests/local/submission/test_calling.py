"""What a worker of a function does with its submission, in processes without agents."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pytest
import submitit
from submitit.core import utils
from torch.distributed.elastic.multiprocessing import errors

import slurm_elastic
from slurm_elastic.control.agent_side import RoundControl
from slurm_elastic.submission import worker
from slurm_elastic.submission.payload import Checkpointing, read_ranks
from tests.local.waiting import eventually


class Counter:
    """A callable that submitit can checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, word: str) -> tuple[int, str]:
        return self.count, word

    def checkpoint(self, word: str) -> utils.DelayedSubmission:
        self.count += 1
        return submitit.helpers.DelayedSubmission(self, f"{word}+")


def _submit(folder: Path, source: str) -> None:
    """Submit what `source` calls `function`."""
    # Functions of the main module reach the workers by value.
    names = {"__name__": "__main__"}
    exec(source, names)
    utils.DelayedSubmission(names["function"]).dump(folder / "uid.pkl")


def _start(folder: Path, rank: int = 0, **environ: str) -> int:
    """Start one worker of what was submitted, and return its id. It is forked, as its imports take seconds."""
    assert errors.record, "imported here"
    if (pid := os.fork()) == 0:
        os.environ.update(environ, RANK=str(rank), WORLD_SIZE="2", SLURM_ELASTIC_NODE="n2", SLURM_ELASTIC_RUN_ID="7")
        _become_worker(folder)
    return pid


def _become_worker(folder: Path) -> NoReturn:
    """Be a new process of ``python -m slurm_elastic.submission.worker``, but for its imports."""
    sys.stdout, sys.stderr = ((folder / name).open("w") for name in ("stdout", "stderr"))
    # It may have been imported for another test.
    for module, name in ((sys.modules, "slurm_elastic.trainer"), (vars(slurm_elastic), "trainer")):
        module.pop(name, None)
    sys.argv[1:] = [str(folder), "uid"]
    code: object = 1
    try:
        worker.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(int(str(code)))


def _ended(folder: Path, pid: int) -> tuple[int, str]:
    """Wait for its end, and return its exit code and what it said."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (folder / "stderr").read_text()


def _work(folder: Path, source: str, rank: int = 0) -> tuple[int, str]:
    """Submit this, and run one worker of it."""
    _submit(folder, source)
    return _ended(folder, _start(folder, rank))


def _value(folder: Path, rank: int) -> Any:
    return utils.pickle_load(folder / f"7_{rank}_result.pkl")


def test_result_lies_where_submitit_looks(tmp_path: Path) -> None:
    source = "import os\ndef function(): return os.environ['RANK'], os.environ['SUBMITIT_EXECUTOR']"
    assert _work(tmp_path, source) == (0, "")
    assert _value(tmp_path, 0) == ("success", ("0", "elastic"))
    assert read_ranks(utils.JobPaths(tmp_path, job_id="7")) == 2


def test_module_that_the_nodes_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/own.py").write_text("def function(): pass\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "modules")
        _submit(tmp_path, "from own import function")
    del sys.modules["own"]
    code, told = _ended(tmp_path, _start(tmp_path))
    assert (code, told.count("\n")) == (1, 1)
    assert told.startswith("n2: the function cannot be loaded here: No module named 'own'; put its")


def test_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    code, told = _work(tmp_path, "import threading\ndef function(): return threading.Lock()", rank=1)
    assert code == 1
    assert "TypeError: what the function returned cannot be pickled: cannot pickle '_thread.lock'" in told
    assert not (tmp_path / "7_1_result.pkl").exists()


def test_stop_is_no_result(tmp_path: Path) -> None:
    """That a worker ends well because it was told to stop is not the end of the run."""
    (tmp_path / "control").mkdir()
    control = RoundControl(tmp_path / "control", 0, 1)
    _submit(
        tmp_path, "def function():\n    from slurm_elastic import trainer\n    while not trainer.should_stop(): pass"
    )
    pid = _start(tmp_path, **control.environment(0))
    control.stop_at(eventually(control.hold), "preempted", None)
    assert _ended(tmp_path, pid) == (0, "")
    assert control.progress()[0].stopped
    assert not (tmp_path / "7_0_result.pkl").exists()


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
    assert _work(tmp_path, source) == (0, "")
    assert (tmp_path / "7_0_result.pkl").exists() == (number == signal.SIGUSR2)
