"""How workers come to start: warm, cold with a reason, or not at all."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from slurm_elastic.agent.forkserver import worker_processes
from slurm_elastic.agent.forkserver.protocol import StartInterruptedError, State
from slurm_elastic.agent.forkserver.worker_command import FUNCTION
from slurm_elastic.control.agent_side import RoundControl
from slurm_elastic.errors import UsageError
from tests.local.forkserver.helpers.workplace import HANG, Workplace, result_of

Make = Callable[..., Workplace]
FORKED = "import sys\nprint('torch' in sys.modules)\n"


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("OMP_NUM_THREADS", "OMP_NUM_THREADS is '3' for the worker"), ("PYTHONOPTIMIZE", "PYTHONOPTIMIZE is '3'")],
)
def test_variable_read_at_import(
    place: Workplace, caplog: pytest.LogCaptureFixture, variable: str, reason: str
) -> None:
    place.script.write_text(FORKED)
    assert place.run_warm(environment={variable: "3"}).stdout == "False\n"
    assert caplog.messages[0].startswith(f"workers start cold: {reason}")
    assert place.run_warm().stdout == "True\n"


def test_agent_signal_mask_and_handlers_do_not_matter(place: Workplace) -> None:
    place.script.write_text(
        "import signal\nprint(signal.pthread_sigmask(0, []), int(signal.getsignal(signal.SIGUSR1)))\n"
    )
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert place.run_warm().stdout == "set() 0\n"
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_worker_is_bound_to_the_cpus_that_torch_chooses_for_it(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.script.write_text("import os\nprint(os.environ['RANK'], os.sched_getaffinity(0))\n")
    cpus = [min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))]

    # As on a machine with GPUs, where it depends on which one is nearest.
    monkeypatch.setattr(worker_processes, "numa_cpus", lambda *_asked: tuple((cpu,) for cpu in cpus))
    with place.running(workers=2) as context:
        result_of(context)
        seen = [Path(context.stdouts[rank]).read_text() for rank in (0, 1)]
    assert seen == [f"{rank} {{{cpu}}}\n" for rank, cpu in enumerate(cpus)]


def test_a_script_that_sets_variables_for_torch_starts_cold(place: Workplace, caplog: pytest.LogCaptureFixture) -> None:
    place.script.write_text(
        "import os, sys\nos.environ[sys.argv[1]] = 'INFO'\nprint('torch' in sys.modules)\nimport torch\n"
    )
    assert place.run_warm(["NAME"]).stdout == "True\n"
    assert caplog.text == ""
    assert place.run_warm(["TORCH_DISTRIBUTED_DEBUG"]).stdout == "False\n"
    assert "line 2, sets TORCH_DISTRIBUTED_DEBUG, which is read at import; set it in the batch script" in caplog.text


def test_cold_start_on_demand(workplace: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    place = workplace(warm=False)
    place.script.write_text(FORKED)
    assert place.run_warm().stdout == "False\n"
    assert not caplog.messages


def test_torch_that_cannot_be_imported(workplace: Make, caplog: pytest.LogCaptureFixture) -> None:
    """As where a module beside the script hides it: the script says so itself, or goes without torch."""
    place = workplace(modules={"torch": "raise ImportError('not the one')\n"})
    place.script.write_text(FORKED)
    assert place.run_warm().stdout == "False\n"
    assert caplog.messages == ["workers start cold: torch cannot be imported: ImportError: not the one"]


def test_program_that_is_not_there(workplace: Make) -> None:
    place = workplace(warm=False, entrypoint="/no/such/program")
    with pytest.raises(OSError, match="/no/such/program is no program"):
        place.context()


def test_broken_preload_is_named(workplace: Make) -> None:
    place = workplace(preload=["json", "no_such_module"])
    with pytest.raises(UsageError, match=r"no_such_module cannot be imported: ModuleNotFoundError: No module named"):
        place.context()


def test_preload_that_kills_the_process_is_named(workplace: Make, caplog: pytest.LogCaptureFixture) -> None:
    place = workplace(preload=["deadly"], modules={"deadly": "import os\nos.kill(os.getpid(), 9)\n"})
    place.script.write_text(FORKED)
    assert place.run_warm().stdout == "True\n"
    assert caplog.messages == ["each worker imports deadly itself: importing it ends the process (SIGKILL)"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            # The kernel is told a thread's name since Python 3.14.
            "import threading; threading.Thread(target=threading.Event().wait, name='python', daemon=True).start()",
            "starts a thread (python)",
        ),
        ("import subprocess; child = subprocess.Popen(['sleep', '1000'])", "starts a process"),
        # As where there is a GPU.
        ("import torch; torch.cuda.is_initialized = lambda: True", "initializes CUDA"),
    ],
)
def test_preload_after_which_a_fork_is_no_fresh_start_is_left_out(
    workplace: Make, caplog: pytest.LogCaptureFixture, line: str, reason: str
) -> None:
    modules = {"lively": line + "\n", "outer": "import calm, lively\n", "calm": "", "last": ""}
    place = workplace(preload=["calm", "outer", "last"], modules=modules)
    place.script.write_text(f"{FORKED}print([name for name in {[*modules]} if name in sys.modules])\n")
    assert place.run_warm().stdout == "True\n['calm', 'last']\n"
    assert caplog.messages == [f"each worker imports outer itself: importing it {reason}"]


def test_preload_after_which_forked_processes_do_not_work_is_found(
    workplace: Make, caplog: pytest.LogCaptureFixture
) -> None:
    line = "import os, torch; me = os.getpid(); torch.cuda._is_in_bad_fork = lambda: os.getpid() != me"
    modules = {"first": "", "second": "", "bad": line, "last": ""}
    place = workplace(preload=[*modules], modules=modules)
    place.script.write_text(f"{FORKED}print([name for name in {[*modules]} if name in sys.modules])\n")
    assert place.run_warm().stdout == "True\n['first', 'second', 'last']\n"
    assert caplog.messages == [
        "each worker imports bad itself: importing it uses CUDA, which forked processes cannot use then"
    ]


def test_thread_pool_that_knows_about_fork_is_no_obstacle(workplace: Make) -> None:
    """OpenBLAS starts one thread per further core when numpy is imported."""
    pytest.importorskip("numpy")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    warm = workplace(preload=["numpy"], environment=environment).fork_server
    assert warm.wait_ready(HANG)
    assert warm.state is State.WARM, warm.reason


def test_waiting_for_imports_can_be_stopped(workplace: Make) -> None:
    place = workplace(preload=["slow"], modules={"slow": "import time\ntime.sleep(1000)\n"})
    asked = []
    with pytest.raises(StartInterruptedError):
        place.fork_server.wait_ready(HANG, lambda: asked.append(1) is None and len(asked) > 2)
    assert not place.fork_server.wait_ready(0)


def test_worker_inherits_nothing_of_the_agent(workplace: Make) -> None:
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))
        os.set_inheritable(ours.fileno(), True)
        place = workplace()
        place.script.write_text(
            "import os\n"
            "files = {name: f'/proc/self/fd/{name}' for name in os.listdir('/proc/self/fd')}\n"
            # The listing's own is closed by now; libffi 3.5 has its own file open where ctypes is imported.
            "files = {name: os.readlink(file) for name, file in files.items() if os.path.lexists(file)}\n"
            "print(sorted(name for name, file in files.items() if 'libffi' not in file), files)\n"
        )
        for environment in ({}, {"TORCH_COLD": "1"}):
            seen = place.run_warm(environment=environment).stdout
            assert seen.startswith("['0', '1', '2'] ")
            assert "socket" not in seen


def multiplied(*numbers: int) -> list[int]:
    print("in", os.environ["RANK"], __name__)
    return [number * int(os.environ["FACTOR"]) for number in numbers]


def failing(_number: int) -> None:
    raise ValueError("in a function")


def succeeding(_number: int) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    # As a site's own error handler has it; torch calls it since 2.15.
    ErrorHandler.record_success = lambda handler: print("succeeded:", handler._fn_name)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_functions_as_entry_points(workplace: Make, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    place = workplace(program=FUNCTION, entrypoint=multiplied, warm=warm, with_torch=True)
    workers = 2 if warm else 1
    with place.running([1, 2], {"FACTOR": "5"}, workers=workers) as context:
        result = result_of(context)
        assert result.return_values == {rank: [5, 10] for rank in range(workers)}, place.read(context, result)
        last = workers - 1
        assert Path(context.stdouts[last]).read_text() == f"in {last} tests.local.forkserver.test_start\n"
    place.entrypoint = failing
    ended = place.run_warm([1])
    assert ended.code == 1
    assert ended.error is not None
    assert ended.error["message"]["message"] == "ValueError: in a function"
    if warm:
        # The success of a function is recorded as by torch.
        place.entrypoint = succeeding
        ended = place.run_warm([1])
        assert ended == place.run_plain([1])
        told = hasattr(ErrorHandler, "record_success")
        assert (ended.code, ended.stdout) == (0, "succeeded: succeeding\n" if told else "")


def test_function_that_cannot_be_pickled(workplace: Make) -> None:
    place = workplace(program=FUNCTION, entrypoint=lambda: 1)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        place.context()


@pytest.mark.parametrize("preload", [(), ("slurm_elastic.trainer",)])
def test_worker_finds_its_control_page(
    workplace: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    place = workplace(preload=list(preload))
    place.script.write_text(f"{FORKED}from slurm_elastic import trainer\nprint(trainer.should_stop(3))\n")
    control = RoundControl(tmp_path / "pages", 0, 1)
    assert place.run_warm(environment=control.environment(0)).stdout == "True\nNone\n"
    assert [(worker.boundary, worker.step) for worker in control.progress()] == [(1, 3)]
