from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import open_own, require_own, require_safe_parent, write_own
from slurm_elastic.rundir import RunDir

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_no_umask_opens_a_run_directory_to_others(tmp_path: Path, umask: int) -> None:
    run_dir = RunDir.for_run(tmp_path, "7").open()
    run_dir.append_event("n1", "{}")
    run_dir.publish_record({}, "note")
    for path in (run_dir.path.parent, run_dir.path, *run_dir.path.rglob("*")):
        assert mode(path) & 0o022 == 0, path
    assert mode(run_dir.path) == 0o755 & ~umask


def test_an_own_directory_that_is_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    require_own(tmp_path)
    assert mode(tmp_path) == 0o755


@as_root
def test_a_directory_of_another_user_is_none_to_work_in(run_dir: RunDir) -> None:
    os.chown(run_dir.path / "rounds", STRANGER, -1)
    with pytest.raises(UsageError, match=r"rounds belongs to another user \(uid 65534\); give a run directory of your"):
        run_dir.open()


@as_root
def test_a_parent_that_others_may_change_needs_the_sticky_bit(run_dir: RunDir) -> None:
    run_dir.path.parent.chmod(0o1777)
    run_dir.open()
    require_safe_parent(Path("/tmp"), fix="")
    run_dir.path.parent.chmod(0o777)
    run_dir.open()
    assert mode(run_dir.path.parent) == 0o755


@as_root
def test_a_parent_of_another_user_is_refused_whatever_its_mode(run_dir: RunDir) -> None:
    os.chown(run_dir.path.parent, STRANGER, -1)
    for permissions in (0o777, 0o1777, 0o755):
        run_dir.path.parent.chmod(permissions)
        with pytest.raises(UsageError, match=r"user \(uid 65534\), who could replace what is in it; give a run"):
            run_dir.open()


@as_root
def test_a_link_of_another_user_is_refused_and_an_own_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elastic-runs"
    link.symlink_to("elsewhere")
    RunDir.for_run(tmp_path, "7").open()
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"elastic-runs belongs to another user \(uid 65534\)"):
        RunDir.for_run(tmp_path, "7").open()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    link = tmp_path / "stdout.log"
    link.symlink_to(precious)
    for append in (False, True):
        with pytest.raises(OSError, match="symbolic links"):
            write_own(link, append=append)
    with pytest.raises(OSError, match="symbolic links"):
        open_own(link, os.O_RDONLY)
    assert precious.read_text() == "precious"


@as_root
def test_a_file_of_another_user_is_neither_read_nor_emptied(tmp_path: Path) -> None:
    planted = tmp_path / "done.json"
    planted.write_text("{}")
    os.chown(planted, STRANGER, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_own(planted, os.O_RDONLY)
    with pytest.raises(PermissionError, match="belongs to another user"):
        write_own(planted)
    assert planted.read_text() == "{}"


def test_a_fifo_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PermissionError, match="not a regular file"):
        open_own(tmp_path / "fifo", os.O_RDONLY)


def test_what_was_in_an_own_file_is_replaced_or_continued(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for append, content in ((False, b"one"), (True, b"two"), (False, b"3")):
        descriptor = write_own(path, append=append)
        os.write(descriptor, content)
        os.close(descriptor)
    assert path.read_bytes() == b"3"
    assert mode(path) & 0o022 == 0
