from __future__ import annotations

import contextlib
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurm_elastic.agent.node.claims import node_directory
from slurm_elastic.errors import UsageError


def test_directory_of_a_dead_agent_is_removed(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys\n"
            "from slurm_elastic.agent.node.claims import node_directory\n"
            "with node_directory(pathlib.Path(sys.argv[1])) as directory:\n"
            "    print(directory, flush=True)\n"
            "    sys.stdin.read()\n",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as living:
        with agent:
            assert agent.stdout is not None
            first = Path(agent.stdout.readline().strip())
            assert stat.S_IMODE(first.stat().st_mode) == 0o700
            second = living.enter_context(node_directory(tmp_path))
            assert first.is_dir()
            agent.kill()
        third = living.enter_context(node_directory(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == {second.name, third.name}
    assert not list(tmp_path.iterdir())


def test_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    refused = pytest.raises(UsageError, match=r"^no directory can be made in .*: No such file .*; make room there, or")
    with refused, node_directory(tmp_path / "missing"):
        pass


def test_without_shared_memory_the_directory_is_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "slurm-elastic-agent-abandoned"
    abandoned.mkdir()
    with node_directory(tmp_path / "missing") as directory:
        assert directory.parent == tmp_path
        assert abandoned.is_dir()
