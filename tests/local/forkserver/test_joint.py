"""Torch is imported once for the agent and its fork server: neither notices it, nor do workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.local.forkserver.helpers.joint import ROOT
from tests.local.forkserver.helpers.workplace import HANG
from tests.local.waiting import eventually

TWICE = "every node imports torch twice, for its agent and for its workers, and starts seconds later"
SCRIPTS = Path(__file__).parent / "scripts"
LOOKING = ("command_line", "finalization", "main_module", "signals", "streams", "threads")
"""Scripts that look at what they find. test_conformance.py runs all of them, with a torch that was imported apart."""


class Agent:
    """`slurm-elastic agent` with one worker, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        script: str,
        environment: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        (directory / "train.py").write_text(script)
        path = os.pathsep.join([*([environment["PYTHONPATH"]] if environment else []), str(ROOT)])
        self.process = subprocess.Popen(
            [
                sys.executable,
                *flags,
                "-m",
                "slurm_elastic",
                "agent",
                "--max-restarts=0",
                "--no-health",
                "train.py",
                "last",
            ],
            cwd=directory,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": path,
                "SLURM_ELASTIC_ETCD_PASSWORD": "private",
                "PET_CONSOLE": "full",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=HANG)
        return self.process.returncode, out, err


@pytest.fixture
def inherited_file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    yield descriptor
    os.close(descriptor)


def test_scripts_run_as_under_torchrun(tmp_path: Path, inherited_file: int) -> None:
    (tmp_path / "scripts").mkdir()
    for name in LOOKING:
        shutil.copy(SCRIPTS / f"{name}.py", tmp_path / "scripts")
    look = (
        "import os, sys\n"
        "files = {name: f'/proc/self/fd/{name}' for name in os.listdir('/proc/self/fd')}\n"
        # The listing's own is closed by now; libffi 3.5 has its own file open where ctypes is imported.
        "is_open = lambda file: os.path.lexists(file) and 'libffi' not in os.readlink(file)\n"
        "print(sorted(name for name, file in files.items() if is_open(file)))\n"
        "ours = ('slurm_elastic', 'hostlist', 'msgspec')\n"
        "print([name for name in sys.modules if name.startswith(ours)])\n"
    )
    (tmp_path / "scripts/look.py").write_text(look)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "helpers" / "joint.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        pass_fds=[inherited_file],
    )
    assert done.returncode == 5, done.stderr
    assert "cold" not in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {*results} == {*LOOKING, "look"}
    assert {name: warm for name, (warm, _plain) in results.items()} == {
        name: plain for name, (_warm, plain) in results.items()
    }


def test_agent_stays_the_process_that_was_started(tmp_path: Path) -> None:
    # As the batch script of an array, beside the training script: files that are no modules.
    for name in ("array.sbatch", "copy.txt", "queue.2.log"):
        (tmp_path / name).touch()
    agent = Agent(
        tmp_path,
        "import os, pathlib, sys\n"
        "warm = pathlib.Path('/proc', str(os.getppid()))\n"
        "agent = pathlib.Path('/proc', (warm / 'stat').read_text().rpartition(')')[2].split()[1])\n"
        "print(agent.name, (warm / 'environ').read_bytes().count(b'\"joint\"'), 'torch' in sys.modules)\n"
        "print((agent / 'cmdline').read_bytes().strip(b'\\0').decode())\n"
        "print(b'SLURM_ELASTIC_WARM' in (agent / 'environ').read_bytes())\n"
        "print(any(b'private' in process.read_bytes() for process in (warm / 'environ', agent / 'environ')))\n"
        "sys.exit(3)\n",
    )
    code, out, err = agent.ends()
    assert code == 1, err
    assert [line.partition("] ")[2] for line in out.splitlines()] == [
        f"{agent.process.pid} 1 True",
        f"{sys.executable} -m slurm_elastic agent --max-restarts=0 --no-health train.py last",
        "False",
        "False",
    ]
    assert "rank 0 on localhost ended with exit code 3" in err
    assert TWICE not in err


def test_signal_during_the_import_makes_the_agent_leave(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "import time\ntime.sleep(1000)\n")
    eventually(lambda: b'"joint"' in Path(f"/proc/{agent.process.pid}/environ").read_bytes())
    agent.process.send_signal(signal.SIGTERM)
    code, _out, err = agent.ends()
    assert code == 75, err


def test_module_beside_the_script_hides_the_one_that_torch_imports(tmp_path: Path) -> None:
    (tmp_path / "uuid.py").write_text(
        "import importlib.util, os, sysconfig\n"
        "real = os.path.join(sysconfig.get_paths()['stdlib'], 'uuid.py')\n"
        "spec = importlib.util.spec_from_file_location('uuid', real)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "globals().update({**vars(module), 'beside': True})\n"
    )
    code, out, err = Agent(tmp_path, "import sys, uuid\nprint('torch' in sys.modules, uuid.beside)\n").ends()
    assert (code, out) == (0, "[localhost/0] True True\n"), err
    assert f"{TWICE}: uuid.py beside the script has the name of a module that torch imports\n" in err


def test_threads_of_a_site_speak_against_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()\n"
    )
    code, out, err = Agent(tmp_path, "import sys\nprint('torch' in sys.modules)\n", {"PYTHONPATH": str(site)}).ends()
    assert (code, out) == (0, "[localhost/0] False\n"), err
    for line in (TWICE, "workers start cold"):
        assert f"{line}: importing torch.distributed.elastic.multiprocessing.errors starts a thread" in err


def test_a_flag_of_python_speaks_against_it(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "import sys\nprint('torch' in sys.modules)\n", flags=["-s"])
    code, out, err = agent.ends()
    assert (code, out) == (0, "[localhost/0] True\n"), err
    assert f"{TWICE}: the agent's Python was started with -s\n" in err
