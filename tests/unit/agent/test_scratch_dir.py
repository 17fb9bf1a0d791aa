from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from slurm_elastic.agent import scratch_dir
from slurm_elastic.agent.scratch_dir import NodeDirectory


def test_directory_of_a_dead_agent_is_removed(tmp_path: Path) -> None:
    first = NodeDirectory("test", tmp_path)
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    second = NodeDirectory("test", tmp_path)
    assert first.path.is_dir()
    os.close(first._fd)  # as the kernel does when its agent dies
    third = NodeDirectory("test", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {second.path.name, third.path.name}
    for directory in (second, third, third):
        directory.close()
    assert not list(tmp_path.iterdir())


def test_directory_that_nobody_can_make(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        NodeDirectory("test", tmp_path / "missing")


def test_without_shared_memory_the_directory_is_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_dir, "_SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "slurm-elastic-test-abandoned"
    abandoned.mkdir()
    directory = NodeDirectory("test")
    assert directory.path.parent == tmp_path
    assert abandoned.is_dir()
    directory.close()
