"""What every keeper of the records has to do, and what the run directory does when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.records.api import RunDirRecords, Situation
from slurm_elastic.rundir import RunDir
from tests.unit.rendezvous.helpers.records_contract import RecordsContract


class TestRunDirRecords(RecordsContract):
    @pytest.fixture
    def records(self, tmp_path: Path) -> RunDirRecords:
        return RunDirRecords(RunDir.for_run(tmp_path, "7").open(), "7.0")

    @pytest.fixture
    def sibling(self, records: RunDirRecords, tmp_path: Path) -> RunDirRecords:
        return RunDirRecords(RunDir.for_run(tmp_path, "7"), "7.0")

    @pytest.fixture
    def successor(self, records: RunDirRecords, tmp_path: Path) -> RunDirRecords:
        return RunDirRecords(RunDir.for_run(tmp_path, "7"), "7.1")


def test_a_run_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    records = RunDirRecords(RunDir.for_run(tmp_path, "7"), "7.0")
    with pytest.raises(RecordsError, match="it or its directory is gone"):
        records.claim_round(0, {})


def test_a_truncated_record_is_an_error_and_not_a_record(run_dir: RunDir) -> None:
    run_dir.secret()
    (run_dir.path / "rounds/000000.json").write_bytes(b'{"places": ')
    with pytest.raises(RecordsError, match="not one complete JSON object"):
        RunDirRecords(run_dir, "7.0").situation()


def test_a_truncated_endpoint_is_none_since_whoever_leads_next_replaces_it(run_dir: RunDir) -> None:
    run_dir.secret()
    (run_dir.path / "endpoints/7.0.json").write_bytes(b'{"port": ')
    assert RunDirRecords(run_dir, "7.0").situation().endpoint is None


def test_the_record_of_a_known_round_is_not_read(run_dir: RunDir) -> None:
    records = RunDirRecords(run_dir, "7.0")
    assert records.claim_round(0, {"places": []})
    (run_dir.path / "rounds/000000.json").write_bytes(b"{}")
    assert records.situation() == Situation(None, None, None)
    assert records.situation(known_round=0) == Situation(None, 0, None)
