from __future__ import annotations

import sys

import pytest

from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program


@pytest.mark.parametrize(
    ("line", "options", "arguments"),
    [
        ("train.py", "-u train.py", ""),
        ("train.py --nnodes 3 -m", "-u train.py", "--nnodes 3 -m"),
        ("--nnodes=1:4 --nproc-per-node=2 -m package.train --lr 1", "-u -m package.train", "--lr 1"),
        ("--module train", "-u -m train", ""),
        ("--modul train", "-u -m train", ""),
        ("--virtual-local-rank -- -odd.py y", "-u -odd.py", "y"),
        ("--no-health --no-watchdog train.py y", "-u train.py", "y"),
    ],
)
def test_program_of_a_command_line(line: str, options: str, arguments: str) -> None:
    found = Program.from_command_line(line.split(), {})
    assert found == Program(sys.executable, tuple(options.split()), tuple(arguments.split()))


@pytest.mark.parametrize(
    "line", ["", "--nnodes 2", "--no-python train.py", "--no-p --nnodes 2 train.py", "--standalone"]
)
def test_no_python_program(line: str) -> None:
    assert Program.from_command_line(line.split(), {}) is None


def test_switches_from_the_environment() -> None:
    assert Program.from_command_line(["train"], {"PET_MODULE": "1"}) == Program.script("train", module=True)
    assert Program.from_command_line(["train"], {"PET_MODULE": "0"}) == Program.script("train")
    assert Program.from_command_line(["train"], {"PET_NO_PYTHON": "1"}) is None


def test_run_path_is_a_function() -> None:
    assert Program.from_command_line(["--run-path", "train.py", "x"], {}) is FUNCTION


def test_other_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/other/python")
    assert Program.script("train.py", ["x"]).command() == ["/other/python", "-u", "train.py", "x"]


def test_arguments_of_a_command() -> None:
    found = Program("/python", ("-u", "train.py"), ("x",))
    assert found.arguments_of(["/python", "-u", "train.py", "y", "z"]) == ("y", "z")
    assert found.arguments_of(["/python", "-u", "train.py"]) == ()
    assert found.arguments_of(["/python", "-u", "other.py", "x"]) is None
    assert found.arguments_of(["/python3", "-u", "train.py", "x"]) is None
    assert found.arguments_of(["/python", "-u"]) is None
