from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slurm_elastic.agent.node.claims import NodeDirectory


def test_directory_of_a_dead_agent_is_removed(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys\n"
            "from slurm_elastic.agent.node.claims import NodeDirectory\n"
            "print(NodeDirectory('test', pathlib.Path(sys.argv[1])).path, flush=True)\n"
            "sys.stdin.read()\n",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with agent:
        assert agent.stdout is not None
        first = Path(agent.stdout.readline().strip())
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        second = NodeDirectory("test", tmp_path)
        assert first.is_dir()
        agent.kill()
    third = NodeDirectory("test", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {second.path.name, third.path.name}
    for directory in (second, third, third):
        directory.close()
    assert not list(tmp_path.iterdir())


def test_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match="No such file"):
        NodeDirectory("test", tmp_path / "missing")


def test_without_shared_memory_the_directory_is_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "slurm-elastic-test-abandoned"
    abandoned.mkdir()
    directory = NodeDirectory("test", tmp_path / "missing")
    assert directory.path.parent == tmp_path
    assert abandoned.is_dir()
    directory.close()
