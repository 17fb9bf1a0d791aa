"""The commands of the documentation that need no cluster, as they stand there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_commands import HERE, shell_commands

ROOT = Path(__file__).parents[2]
TRAIN = """\
from slurm_elastic import trainer

for step in range(1, 6):
    print("step", step, flush=True)
    if trainer.should_stop(step):
        break
"""


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with train.py, and programs named slurm-elastic and mail in PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "slurm-elastic").write_text(f'#!/bin/sh\nexec {sys.executable} -m slurm_elastic "$@"\n')
    (programs / "mail").write_text('#!/bin/sh\n(echo "$*"; cat) >>mailed\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # What an agent learns has tests of its own.
    monkeypatch.setenv("PET_LEARN_IMPORTS", "off")
    monkeypatch.setenv("SLURM_JOB_ID", "")
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "train.py").write_text(TRAIN)
    return directory


def test_commands_of_the_documentation_run(login_node: Path) -> None:
    said: dict[str, str] = {}
    runs: list[str] = []
    for command in HERE:
        # The page's run is another one.
        words = command.replace("1234", runs[0]) if runs else command
        done = subprocess.run(["bash", "-c", words], cwd=login_node, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        said[command] = done.stdout + done.stderr
        if " agent " in command:
            runs = [each["run"] for each in _listed(login_node)]
    (page,) = login_node.glob("report-*.html")
    assert "finished" in page.read_text()
    assert (login_node / "digits.py").read_text() == (ROOT / "docs/examples/digits.py").read_text()
    for name in ("elastic.sbatch", "array.sbatch"):
        subprocess.run(["bash", "-n", name], cwd=login_node, check=True)
        assert "#SBATCH" in (login_node / name).read_text()
    told = {command.partition(" ")[2].partition(" ")[0]: text for command, text in said.items()}
    assert "\n#SBATCH --nodes=4\n" in told["submit"]
    assert f"finished  {runs[0]}" in told["list"]
    assert told["status"].startswith(f"run {runs[0]}: finished")
    assert [line.rpartition(" ")[2] for line in told["logs"].splitlines()] == ["1", "2", "3", "4", "5"]
    mails = (login_node / "mailed").read_text().splitlines()
    assert [mails[0], mails[2]] == ["-s elastic me@example.org", "-s run  me@example.org"]
    assert [json.loads(mails[number])["event"] for number in (1, 3)] == ["finished", "finished"]


def test_what_the_first_run_installs_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hatchling", "textual"):
        pytest.importorskip(name)
    # Without a network, in the environment of the tests, which stays as it is.
    for option in ("NO_INDEX=1", "DRY_RUN=1", "NO_BUILD_ISOLATION=0", "DISABLE_PIP_VERSION_CHECK=1"):
        monkeypatch.setenv(*f"PIP_{option}".split("="))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for command in {command for _, command in shell_commands() if command.startswith("pip ")}:
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert "Would install slurm_elastic" in done.stdout
        assert "does not provide the extra" not in done.stderr


def _listed(directory: Path) -> list[dict[str, str]]:
    done = subprocess.run(["slurm-elastic", "list", "--json"], cwd=directory, capture_output=True, text=True)
    found: list[dict[str, str]] = json.loads(done.stdout) if done.stdout else []
    return found
