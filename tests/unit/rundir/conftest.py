"""Run directories on disks of all kinds."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_base() -> Iterator[Path]:
    """Give a directory that every user can look into, unlike pytest's."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    yield base
    shutil.rmtree(base)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small file systems in memory."""
    mounted: list[Path] = []

    def tmpfs(options: str) -> Path:
        where = tmp_path / f"mounted{len(mounted)}"
        where.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], check=True, timeout=20)
        mounted.append(where)
        return where

    yield tmpfs
    for where in mounted:
        subprocess.run(["umount", "--lazy", where], check=True, timeout=20)
