"""What may be unpickled: a pickle runs any code, so no other user can have written it or put it in its place."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest

import slurm_elastic
from slurm_elastic.ownership import unpickle

STRANGER = 65534
PACKAGE = Path(slurm_elastic.__file__).parent
DOCS = Path(__file__).parents[2] / "docs" / "security.md"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "own" / "found.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps([1]))
    return path


def test_an_own_file_and_a_descriptor(path: Path) -> None:
    assert unpickle(path) == [1]
    assert unpickle(os.open(path, os.O_RDONLY)) == [1]


def test_an_own_directory_is_closed_to_others(path: Path) -> None:
    path.parent.chmod(0o775)
    assert unpickle(path) == [1]
    assert path.parent.stat().st_mode & 0o777 == 0o755


@as_root
@pytest.mark.parametrize("which", ["file", "directory", "both"])
def test_what_belongs_to_another_user_is_not_read(path: Path, which: str) -> None:
    for each in {"file": [path], "directory": [path.parent], "both": [path, path.parent]}[which]:
        os.chown(each, STRANGER, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        unpickle(path)


def test_a_file_that_others_may_write_a_link_and_a_pipe_are_not_read(path: Path, tmp_path: Path) -> None:
    path.chmod(0o664)
    with pytest.raises(PermissionError, match="open to others for writing"):
        unpickle(path)
    path.chmod(0o644)
    (path.parent / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        unpickle(path.parent / "link")
    os.mkfifo(path.parent / "pipe", 0o600)
    with pytest.raises(PermissionError, match="not a regular file"):
        unpickle(path.parent / "pipe")


def test_no_other_module_unpickles_and_the_docs_name_each_that_has_it_done() -> None:
    """But the fork server, whose memory files and signed lists come from its own agent."""
    loads = re.compile(
        r"\b(pickle|marshal|cloudpickle|dill)\.(loads?|Unpickler)\(|\bpickle_load\(|_get_outcome_and_result"
    )
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {name for name, text in sources.items() if loads.search(text) and "forkserver" not in name}
    assert found == {"ownership.py"}
    callers = {name for name, text in sources.items() if re.search(r"\bunpickle\(", text)} - found
    assert callers
    table = DOCS.read_text().partition("## What is unpickled or executed")[2].partition("\n## ")[0]
    assert callers == set(re.findall(r"^\| `([a-z_/]+\.py)` \|", table, flags=re.MULTILINE)) - {"agent/forkserver/"}
