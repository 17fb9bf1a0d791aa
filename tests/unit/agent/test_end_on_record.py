"""Coordinators and nodes of `grow` read in the records how a run has ended."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_elastic.agent.root_cause import end_on_record
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rundir import RunDir

FAILURE = msgspec.to_builtins(WorkerFailure("n1/7.0/11", "n1", 0, 3))


@pytest.mark.parametrize(
    ("agent", "code"), [("n1/7.0/11", ExitCode.FAILED), ("n1/8.0/12", None)], ids=["failed", "begun again since"]
)
def test_a_failure_counts_if_it_is_one_of_the_newest_round(tmp_path: Path, agent: str, code: ExitCode | None) -> None:
    records = RunDirRecords(RunDir.for_run(tmp_path, "7").open(), "7.0")
    assert end_on_record(records) is None
    records.publish_failure(FAILURE)
    assert end_on_record(records) is None
    records.claim_round(0, {"places": [{"agent": agent}]})
    assert end_on_record(records) is code


def test_a_finished_run_is_finished(tmp_path: Path) -> None:
    records = RunDirRecords(RunDir.for_run(tmp_path, "7").open(), "7.0")
    records.mark_done({})
    assert end_on_record(records) is ExitCode.FINISHED
