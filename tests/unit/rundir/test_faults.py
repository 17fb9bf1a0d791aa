"""Disks that are missing, full, read-only or owned by another user, and records that are not whole."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RecordError, RunContents, RunDir, RunDirError
from tests.unit.rundir.helpers.processes import OTHER_USER, as_root, as_user, hidden


@pytest.mark.parametrize("content", [b"", b'{"port": 1', b"[]", b"\x80\x04N.", b"\xff", b"[" * 100_000, b"{}{}"])
def test_truncated_or_foreign_records_are_reported(run_dir: RunDir, content: bytes) -> None:
    run_dir.secret()
    (run_dir.path / "epochs/0").mkdir()
    for name in ("endpoints/0.json", "epochs/0/000001.json", "rounds/000000.json", "done.json"):
        (run_dir.path / name).write_bytes(content)
    for read in (
        lambda: run_dir.read_record("endpoints", "0"),
        lambda: run_dir.read_record("epochs", "0", 1),
        lambda: run_dir.read_record("rounds", 0),
        run_dir.is_done,
    ):
        with pytest.raises(RecordError, match="not one complete JSON object"):
            read()
    assert (run_dir.newest("epochs", "0"), run_dir.newest("rounds")) == (1, 0)
    assert not run_dir.claim_record({}, "rounds", 0)


def test_a_record_of_gigabytes_is_none_and_a_file_of_gigabytes_is_one_line(run_dir: RunDir) -> None:
    run_dir.secret()
    for name in ("done.json", "events/n1.jsonl"):
        (run_dir.path / name).touch()
        os.truncate(run_dir.path / name, 3 << 30)
    assert not run_dir.is_done()
    contents = RunContents(run_dir)
    assert contents.done() == []
    assert contents.events() == []
    assert [line.partition(": ")[2] for line in contents.problems if "n1.jsonl" in line] == [
        "larger than any file of a run; remove it"
    ]


def test_a_missing_base(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere is no directory on this node; .*--run-dir"):
        RunDir.for_run(tmp_path / "nowhere", "1").open()


def test_a_file_with_the_name_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "elastic-runs").touch()
    with pytest.raises(UsageError, match="elastic-runs: a file has the name of a directory"):
        RunDir.for_run(tmp_path, "1").open()


@as_root
def test_a_directory_of_somebody_else(open_base: Path) -> None:
    run = RunDir.for_run(open_base, "1")
    message = str(as_user(OTHER_USER, run.open))
    assert f"{run.path.parent}: no permission for this user; fix" in message
    assert "--run-dir" in message
    run.open()
    error = as_user(OTHER_USER, run.open)
    assert isinstance(error, UsageError)
    assert f"{run.path}: no permission" in str(error)
    error = as_user(OTHER_USER, lambda: run.claim_record({}, "rounds", 0))
    assert isinstance(error, RunDirError)
    assert "secret: no permission" in str(error)


@as_root
def test_a_base_that_cannot_be_looked_into(open_base: Path) -> None:
    (open_base / "closed" / "base").mkdir(parents=True)
    (open_base / "closed").chmod(0o700)
    error = as_user(OTHER_USER, RunDir.for_run(open_base / "closed" / "base", "1").open)
    assert isinstance(error, UsageError)
    assert "no permission" in str(error)


@as_root
@pytest.mark.parametrize("options", ["size=16k", "size=1m,nr_inodes=6"])
def test_a_full_disk(mount: Callable[[str], Path], options: str) -> None:
    with pytest.raises(UsageError, match="the file system is full; free some space, or give another"):
        RunDir.for_run(mount(options), "1").open()


@as_root
def test_a_disk_that_gets_full_later(mount: Callable[[str], Path]) -> None:
    base = mount("size=1m")
    run = RunDir.for_run(base, "1").open()
    run.publish_record({}, "endpoints", "0")
    (base / "filler").write_bytes(bytes(900_000))
    for act in (
        lambda: run.publish_record({"text": "x" * 200_000}, "endpoints", "0"),
        lambda: run.claim_record({"text": "x" * 200_000}, "epochs", "0", 1),
        lambda: run.append_event("n1", "x" * 200_000),
    ):
        with pytest.raises(RunDirError, match="the file system is full"):
            act()
    assert run.read_record("endpoints", "0") == {}
    assert run.newest("epochs", "0") is None
    assert hidden(base) == []


@as_root
def test_a_read_only_disk(mount: Callable[[str], Path]) -> None:
    base = mount("size=1m")
    run = RunDir.for_run(base, "1").open()
    subprocess.run(["mount", "-o", "remount,ro", base], check=True, timeout=20)
    with pytest.raises(UsageError, match="mounted read-only"):
        run.open()
    with pytest.raises(RunDirError, match="mounted read-only"):
        run.claim_record({}, "rounds", 0)
    assert run.newest("rounds") is None


def test_a_directory_removed_under_way(run_dir: RunDir) -> None:
    shutil.rmtree(run_dir.path)
    with pytest.raises(RunDirError, match="it or its directory is gone"):
        run_dir.claim_record({}, "rounds", 0)
    assert run_dir.newest("rounds") is None
    assert run_dir.newest("epochs", "0") is None


@pytest.mark.parametrize(
    ("action", "result"),
    [
        (lambda run_dir: run_dir.claim_record({"epoch": 1}, "rounds", 1), True),
        (lambda run_dir: run_dir.read_record("rounds", 0), {"epoch": 1}),
        (lambda run_dir: run_dir.newest("rounds"), 0),
        (lambda run_dir: run_dir.append_event("n1", "{}"), None),
    ],
    ids=["claim", "read", "list", "append"],
)
def test_a_record_waits_for_a_descriptor(run_dir: RunDir, action: Callable[[RunDir], object], result: object) -> None:
    assert run_dir.claim_record({"epoch": 1}, "rounds", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 50, hard))

    def give_back() -> None:
        for descriptor in taken:
            os.close(descriptor)

    later = threading.Timer(0.2, give_back)
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        later.start()
        assert action(run_dir) == result
    finally:
        later.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
