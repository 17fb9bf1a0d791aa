"""Public training scripts, in short, as their users start them: as under torchrun, and with nodes that go and come.

`scripts` are own scripts in the shape of public ones, without a line for slurm_elastic. docs/howto/frameworks.md has
the table of what they do here.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.local import frameworks
from tests.local.agents import ROOT, Agent, Allocation, allocation
from tests.local.waiting import HANG, eventually

SCRIPTS = Path(__file__).with_name("scripts")
OPTIONS = ("--start=warm", "--max-restarts=0", "--rdzv-conf=last_call_timeout=0.5")


@dataclass(frozen=True)
class Stranger:
    """One script.

    Attributes:
        files: The script, and what it reads.
        arguments: A training of a second.
        long: Those of one without end, which saves its state every second or more often.
        library: That it imports, of the environment with training frameworks; empty for torch alone.
        resume: The argument with which it resumes, and the checkpoint that has to be there for it.
    """

    files: tuple[str, ...]
    arguments: tuple[str, ...]
    long: tuple[str, ...]
    library: str = ""
    resume: tuple[str, str] | None = None

    @property
    def python(self) -> str:
        """The interpreter that has the library."""
        return str(frameworks.PYTHON) if self.library else sys.executable

    def require(self) -> None:
        """Skip the test where the library is not installed."""
        if self.library:
            frameworks.require()
            command = [frameworks.PYTHON, "-c", f"import {self.library}"]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip(f"{self.library} is not installed beside the frameworks")


STRANGERS = {
    "nanogpt": Stranger(
        ("nanogpt.py",),
        (),
        ("--max_iters=1000000000", "--eval_interval=5", "--pause=0.02"),
        resume=("--init_from=resume", "out/ckpt.pt"),
    ),
    "tutorial": Stranger(
        ("tutorial.py",), ("4", "1", "--batch_size", "16"), ("1000000000", "5", "--batch_size=4", "--pause=0.02")
    ),
    "imagenet": Stranger(
        ("imagenet.py",),
        ("--dummy", "-a", "resnet50", "--seed", "1", "--resume", "checkpoint.pth.tar"),
        ("--dummy", "--seed", "1", "--resume", "checkpoint.pth.tar", "--epochs=1000000000", "--pause=0.02"),
    ),
    "mingpt": Stranger(
        ("mingpt.py", "gpt2_train_cfg.yaml"),
        ("trainer_config.batch_size=8",),
        ("trainer_config.max_epochs=1000000000", "trainer_config.save_every=5", "trainer_config.pause=0.02"),
        library="hydra",
    ),
    "accelerate": Stranger(("accelerate_loop.py",), (), ("--steps=1000000000", "--pause=0.05"), library="accelerate"),
    "lightning": Stranger(
        ("lightning_cli.py", "layers.yaml"),
        ("fit", "--config", "layers.yaml"),
        ("fit", "--config", "layers.yaml", "--trainer.max_steps=1000000000", "--model.pause=0.05"),
        library="jsonargparse",
    ),
}


WRAPPER = """\
import os, runpy, sys
sys.argv = ["{script}", *sys.argv[1:], *(["{option}"] if os.path.exists("{checkpoint}") else [])]
runpy.run_path("{script}", run_name="__main__")
"""
"""As docs/howto/resume.md has it."""


def workplace(directory: Path, stranger: Stranger) -> Path:
    """A directory with the script; of what was there, the runs are left."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.is_dir() and path.name != "elastic-runs":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    for name in stranger.files:
        shutil.copy(SCRIPTS / name, directory)
    return directory


def start(nodes: Allocation, number: int, stranger: Stranger, *options: str, script: Sequence[str]) -> Agent:
    """Start an agent, by a command line where it is one of another environment."""
    if not stranger.library:
        return nodes.start(number, *OPTIONS, *options, script=script)
    address = f"--local-addr={nodes.nodes[number - 1]}"
    command = [stranger.python, "-m", "slurm_elastic", "agent", address, *OPTIONS, *options, *script]
    return nodes.command(number, *command)


def left_by(directory: Path) -> list[str]:
    """The files that the script has made."""
    ours = ("elastic-runs", "agents", "__pycache__")
    paths = (path.relative_to(directory) for path in directory.rglob("*"))
    return sorted(str(path) for path in paths if not set(path.parts) & set(ours))


def under_torchrun(directory: Path, stranger: Stranger, workers: int) -> tuple[int, list[str], list[str]]:
    """Exit code, lines on stdout and files."""
    # Two workers that write to one pipe at once tear each other's lines.
    logs = directory.with_name("logs")
    command = [stranger.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["--redirects=1", f"--log-dir={logs}"]
    with allocation(directory, 1) as node:
        environment = {**node.environment(1), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        for name in [name for name in environment if name.startswith("SLURM")]:
            del environment[name]
        ended = subprocess.run(
            [*command, stranger.files[0], *stranger.arguments],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3 * HANG,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    lines = [line for log in logs.rglob("stdout.log") for line in log.read_text().splitlines()]
    return ended.returncode, sorted(lines), left_by(directory)


@pytest.mark.parametrize(
    ("name", "workers"), [("tutorial", 1), *(pytest.param(name, 2, marks=pytest.mark.nightly) for name in STRANGERS)]
)
def test_a_script_runs_as_under_torchrun_and_so_it_does_a_second_time(tmp_path: Path, name: str, workers: int) -> None:
    stranger = STRANGERS[name]
    stranger.require()
    theirs = under_torchrun(workplace(tmp_path / "theirs", stranger), stranger, workers)
    directory = tmp_path / "ours"
    for job in ("7", "8"):
        # The second one begins where the first did, but has what was learned of it.
        with allocation(workplace(directory, stranger), 1, job_id=job) as nodes:
            script = (stranger.files[0], *stranger.arguments)
            agent = start(nodes, 1, stranger, f"--nproc-per-node={workers}", script=script)
            code = agent.wait()
            lines = sorted(re.sub(r"^\[127\.0\.0\.1/\d\] ", "", line) for line in agent.out.splitlines())
            assert (code, lines, left_by(directory)) == theirs, agent.err


def rounds_of(nodes: Allocation) -> list[list[int]]:
    """The numbers of the steps of each round, as its rank 0 has printed them."""
    found: list[list[int]] = [[] for _ in range(nodes.rounds())]
    for path in nodes.run_dir.glob("logs/round_*/*/rank_00/stdout.log"):
        number = int(path.parts[-4].removeprefix("round_"))
        if number < len(found):
            found[number] = [int(step) for step in re.findall(r"^step (\d+): ", path.read_text(), re.MULTILINE)]
    return found


def trained_after(nodes: Allocation, number: int, size: int) -> tuple[int, int]:
    """Wait for a round after this one, of so many nodes, that has taken some steps: its number, and its first step."""

    def trained() -> tuple[int, int] | None:
        assert any(agent.running() for agent in nodes.agents), nodes.log()
        for round_, steps in enumerate(rounds_of(nodes)):
            if round_ > number and len(steps) > 12 and len(nodes.nodes_of_round(round_)) == size:
                return round_, steps[0]
        return None

    found: tuple[int, int] = eventually(trained, lambda: f"no round of {size}: {rounds_of(nodes)}\n{nodes.log()}")
    return found


SIZES = {"nanogpt": (4, 2, 4, 2)}
"""Of a script that cannot use three nodes."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", STRANGERS)
def test_a_script_goes_on_when_a_node_is_killed_and_joins_and_is_preempted(tmp_path: Path, name: str) -> None:
    stranger = STRANGERS[name]
    stranger.require()
    directory = workplace(tmp_path / "ours", stranger)
    script = stranger.files[0]
    if stranger.resume is not None:
        option, checkpoint = stranger.resume
        script = "resume.py"
        text = WRAPPER.format(script=stranger.files[0], option=option, checkpoint=checkpoint)
        (directory / script).write_text(text)
    sizes = SIZES.get(name, (4, 3, 4, 3))
    words: dict[str, Any] = {"script": (script, *stranger.long)}
    with allocation(directory, 4) as nodes:
        for number in range(1, 5):
            start(nodes, number, stranger, "--nnodes=1:4", **words)
        first, _ = trained_after(nodes, -1, sizes[0])
        nodes.agents[3].kill()
        killed, step = trained_after(nodes, first, sizes[1])
        assert step > 0
        start(nodes, 4, stranger, "--nnodes=1:4", **words)
        joined, next_step = trained_after(nodes, killed, sizes[2])
        assert next_step >= step
        nodes.agents[2].signal(signal.SIGTERM)
        assert nodes.agents[2].wait() == 75
        _, last_step = trained_after(nodes, joined, sizes[3])
        assert last_step >= next_step
        assert {record["restarts"] for record in nodes.records()} == {0}, nodes.log()
        assert all(nodes.agents[index].running() for index in (0, 1, 4))
