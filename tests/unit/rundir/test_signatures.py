"""Records that others have put into a run directory: they change nothing, and take no record's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.rundir import JobRecords, RunDir
from slurm_elastic.rundir._signed_files import sign, verified
from tests.unit.rundir.helpers.processes import OTHER_USER, as_root, as_user, hidden, race

NAMES = ("done.json", "endpoints/0.json", "epochs/0/000001.json", "rounds/000000.json", "failures/0.json")
RECORD = {"epoch": 1}


def forged(run_dir: RunDir, path: Path) -> None:
    path.write_bytes(b'{"epoch": 9}')


def signed_by_others(run_dir: RunDir, path: Path) -> None:
    path.write_bytes(sign(bytes(32), path.relative_to(run_dir.path).as_posix(), b'{"epoch": 9}'))


def signed_for_another_name(run_dir: RunDir, path: Path) -> None:
    path.write_bytes(sign(run_dir.secret(), "rounds/000009.json", b'{"epoch": 9}'))


def linked(run_dir: RunDir, path: Path) -> None:
    path.symlink_to("/etc/passwd")


def given(run_dir: RunDir, path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    path.write_bytes(b"\x1b[2J")
    os.chown(path, OTHER_USER, -1)


Forge = Callable[[RunDir, Path], None]
FORGERIES = (forged, signed_by_others, signed_for_another_name, linked, given)


def forge_all(run_dir: RunDir, forge: Forge) -> None:
    run_dir.secret()
    for name in NAMES:
        path = run_dir.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        forge(run_dir, path)


def contents(run_dir: RunDir) -> list[object]:
    return [
        run_dir.is_done(),
        run_dir.read_record("endpoints", "0"),
        run_dir.newest("epochs", "0"),
        run_dir.read_record("epochs", "0", 1),
        run_dir.newest("rounds"),
        run_dir.read_record("rounds", 0),
        run_dir.read_record("failures", "0"),
    ]


@pytest.mark.parametrize("forge", FORGERIES)
def test_what_others_have_written_counts_as_missing_and_a_record_takes_its_place_once(
    run_dir: RunDir, forge: Forge
) -> None:
    before = contents(run_dir)
    forge_all(run_dir, forge)
    assert contents(run_dir) == before
    run_dir.publish_record(RECORD, "endpoints", "0")
    run_dir.publish_record(RECORD, "failures", "0")
    for claim in (
        lambda: run_dir.mark_done({"epoch": 1}),
        lambda: run_dir.claim_record(RECORD, "epochs", "0", 1),
        lambda: run_dir.claim_record(RECORD, "rounds", 0),
    ):
        assert claim()
        assert not claim()
    assert contents(run_dir) == [True, RECORD, 1, RECORD, 0, RECORD, RECORD]
    # What was there is kept beside.
    assert len([path for path in hidden(run_dir.path) if ".foreign." in path.name]) == 3


def test_a_forged_round_or_epoch_of_the_future_supersedes_nobody(run_dir: RunDir) -> None:
    assert run_dir.claim_record(RECORD, "epochs", "0", 1)
    assert run_dir.claim_record(RECORD, "rounds", 0)
    forged(run_dir, run_dir.path / "epochs/0/000007.json")
    # A signature holds for one name.
    for number in (1, 7):
        (run_dir.path / f"rounds/{number:06d}.json").write_bytes((run_dir.path / "rounds/000000.json").read_bytes())
    assert (run_dir.newest("epochs", "0"), run_dir.newest("rounds")) == (1, 0)


def test_a_group_that_may_write_forges_nothing(open_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ELASTIC_GROUP_WRITE", "1")
    before = os.umask(0o022)
    try:
        run_dir = RunDir.for_run(open_base, "1").open()
        assert run_dir.claim_record(RECORD, "epochs", "0", 1)
    finally:
        os.umask(before)
    modes = {name: (run_dir.path / name).stat().st_mode & 0o777 for name in (".", "rounds", "epochs/0", "logs")}
    assert modes == {".": 0o775, "rounds": 0o775, "epochs/0": 0o775, "logs": 0o755}
    assert run_dir.claim_record(RECORD, "rounds", 0)
    # A record of the user's own that the group has moved, and another file of the user's.
    (run_dir.path / "rounds/000001.json").write_bytes((run_dir.path / "rounds/000000.json").read_bytes())
    (run_dir.path / "done.json").write_bytes(b"a log")
    assert contents(run_dir) == [False, None, 1, RECORD, 0, RECORD, None]
    assert run_dir.mark_done({})
    assert run_dir.is_done()
    # Without the option it is closed again.
    monkeypatch.delenv("SLURM_ELASTIC_GROUP_WRITE")
    run_dir.open()
    assert run_dir.path.stat().st_mode & 0o777 == 0o755


def test_one_process_wins_where_a_forged_record_is_in_the_way(run_dir: RunDir) -> None:
    run_dir.secret()
    for number in range(20):
        forged(run_dir, run_dir.path / f"rounds/{number:06d}.json")
        won = race(lambda racer, number=number: run_dir.claim_record({"by": racer}, "rounds", number), racers=4)
        # Who finds another one at the removal is told so, and does not lead.
        assert won.count(True) == 1
        assert run_dir.read_record("rounds", number) == {"by": won.index(True)}


def test_notices_and_requeues_are_signed_too(run_dir: RunDir) -> None:
    records = JobRecords(run_dir, "7")
    records.publish_notice(0, {"cause": "preempted"})
    assert records.notice(0) == {"cause": "preempted"}
    (run_dir.path / "requeues").mkdir()
    for path in (run_dir.path / "notices/7.0.json", run_dir.path / "requeues/7.0.json"):
        forged(run_dir, path)
    assert records.notice(0) is None
    assert records.requeues() == []
    assert records.claim_requeue(0, {"by": "n1"})
    assert not records.claim_requeue(0, {"by": "n2"})
    assert records.requeues() == [{"by": "n1"}]


def test_others_are_named_in_the_log_within_bounds(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.secret()
    for number in range(30):
        forged(run_dir, run_dir.path / f"rounds/{number:06d}.json")
    # The bound is that of a process, and the others of these tests were logged in this one.
    program = f"""
from slurm_elastic.rundir import RunDir
print([RunDir.for_run({str(tmp_path)!r}, {run_dir.run_id!r}).newest("rounds") for _ in range(3)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[None, None, None]\n"
    lines = done.stderr.splitlines()
    assert len(lines) == 16
    assert lines[-1].endswith("; more are dropped without a word")


def test_records_stay_json_for_everybody(run_dir: RunDir) -> None:
    run_dir.publish_record({"port": 1}, "endpoints", "0")
    shown = json.loads((run_dir.path / "endpoints/0.json").read_bytes())
    assert shown.pop("signature")
    assert shown == {"port": 1}


@as_root
def test_another_user_reads_what_the_owner_has_written(open_base: Path) -> None:
    run_dir = RunDir.for_run(open_base, "1").open()
    assert run_dir.claim_record(RECORD, "rounds", 0)
    record = as_user(OTHER_USER, lambda: RunDir.for_run(open_base, "1").read_record("rounds", 0))
    assert record["epoch"] == 1


def test_without_a_secret_nothing_counts(run_dir: RunDir) -> None:
    for name in NAMES[:2]:
        (run_dir.path / name).write_bytes(sign(b"", name, b'{"epoch": 9}'))
    assert not run_dir.is_done()
    assert run_dir.read_record("endpoints", "0") is None


def test_a_changed_byte_breaks_a_signature() -> None:
    signed = sign(b"secret", "a", b'{"x": {"y": "z"}}')
    assert verified(b"secret", "a", signed) == b'{"x": {"y": "z"}}'
    assert verified(b"secret", "b", signed) is None
    for position in range(len(signed)):
        changed = bytearray(signed)
        changed[position] ^= 1
        assert verified(b"secret", "a", bytes(changed)) is None
