from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.cli.commands.agent import agent_parser
from slurm_elastic.submission.batch_script import LONG_NAMES
from slurm_elastic.submission.submit_options import _SBATCH_SWITCHES, CommandLine, read_command_line
from tests.conftest import Cli

OPTIONS, SWITCHES = agent_parser().long_options()


def _read(text: str) -> CommandLine:
    return read_command_line(text.split(), OPTIONS, {"-m", *SWITCHES})


def test_whose_option_is_which() -> None:
    line = _read(
        "--shape array -N2-4 --partition=low --time 10 --max_restarts 3 --no-watchdog -t 5 --exclusive --rdzv-conf=a=1 "
        "-A me --dry-run train.py --lr 1 --nodes 3"
    )
    assert line.own == {"shape": "array", "nodes": "2-4", "dry-run": None}
    assert line.sbatch == {"partition": "low", "time": "5", "exclusive": None, "account": "me"}
    assert line.agent == ("--max_restarts", "3", "--no-watchdog", "--rdzv-conf=a=1")
    assert (line.script, line.arguments) == ("train.py", ("--lr", "1", "--nodes", "3"))


def test_module_and_end_of_options() -> None:
    assert _read("--requeue -m package.train --x").agent == ("-m",)
    assert _read("-m package.train --x").script == "package.train"
    assert _read("-- --odd.py").script == "--odd.py"


def test_no_option_belongs_to_both() -> None:
    of_sbatch = {f"--{name}" for name in (*LONG_NAMES.values(), *_SBATCH_SWITCHES, "signal", "export", "mem", "gres")}
    assert not OPTIONS & of_sbatch


MISTAKES = {
    "--nodes 4:2 train.py": "at least 4 nodes and at most 2",
    "--nodes two train.py": "neither a number nor MIN:MAX",
    "--nodes 2": "no script",
    "--shape ring train.py": "neither allocation",
    "--nodes 2 tain.py": "did you mean train.py?",
    "--nnodes 2 train.py": "--nnodes cannot be given here: give --nodes, and --nnodes beside it only for",
    "--ntasks-per-node=8 train.py": "--nproc-per-node",
    "--array 0-3 train.py": "--shape array",
    "--max-restarts many train.py": "invalid int value",
    "--template none train.py": "template none: No such file",
}


@pytest.fixture(autouse=True)
def _sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[str, str], None]) -> None:
    """An sbatch that keeps what is submitted, and a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ELASTIC_TEMPLATE", raising=False)
    program("sbatch", "cat >submitted\necho '12;cluster'")
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize("text", MISTAKES)
def test_mistake_is_one_line(text: str, tmp_path: Path, cli: Cli) -> None:
    printed = cli(2, "submit", *text.split())
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert MISTAKES[text] in printed.err
    assert not (tmp_path / "submitted").exists()


def test_submitted_script_is_the_one_of_the_dry_run(tmp_path: Path, cli: Cli) -> None:
    words = ["--nodes=2:4", "--job-name", "digits", "train.py", "--lr", "1 2"]

    shown = cli(0, "submit --dry-run", *words).out
    assert not (tmp_path / "submitted").exists()
    assert "\n#SBATCH --nodes=2-4\n" in shown
    assert "\nset -- --nnodes=2:4 train.py --lr '1 2'\n" in shown

    printed = cli(0, "submit --dry-run --nodes=4 train.py --nodes 2 --dry-run --lr=1")
    assert "\nset -- --nnodes=4:4 train.py --nodes 2 --dry-run --lr=1\n" in printed.out
    assert "\n#SBATCH --nodes=4\n" in printed.out
    assert printed.err == (
        "slurm-elastic: warning: --nodes, --dry-run after train.py goes to the script; options of submit stand before "
        "it\n"
    )

    assert (
        "\nset -- --nnodes=2:2 --nnodes=1:16 train.py\n"
        in cli(0, "submit --dry-run --nodes=2 --nnodes=1:16 train.py").out
    )

    printed = cli(0, "submit", *words)
    assert (tmp_path / "submitted").read_text() == shown
    assert printed.out == "12\n"
    assert printed.err == f"output: {tmp_path}/digits-12.out\n"
