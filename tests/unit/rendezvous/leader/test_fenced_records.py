"""Where the records say that the leader is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords, newest_endpoint
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Reason
from slurm_elastic.rendezvous.membership.assignment import build_table
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rundir import RunDir

TABLE = build_table(0, Reason.START, [AgentInfo("n1/7.0/1", "n1", 0, 1, "trainer", "n1", 20000)], 0)


def place(epoch: int) -> dict[str, Any]:
    return {"agent": f"n{epoch}/7.0/{epoch}", "address": f"n{epoch}", "port": epoch, "epoch": epoch}


@pytest.fixture
def records(tmp_path: Path) -> RunDirRecords:
    return RunDirRecords(RunDir.for_run(tmp_path, "7").open(), "7.0")


def test_a_leader_is_found_although_one_that_it_superseded_said_later_where_it_is(records: RunDirRecords) -> None:
    late, leader = (FencedRecords(records, "7.0", epoch, place(epoch), None) for epoch in (1, 2))
    assert late.take()
    assert leader.claim()
    assert late.confirm()
    late.publish_endpoint()
    assert leader.write_round(TABLE)
    assert newest_endpoint(records.situation(), "7.0") == place(2)
    assert newest_endpoint(records.situation(), "7.1") == place(1), "rounds of others say nothing"


def test_a_leader_that_follows_is_found_before_its_first_round(records: RunDirRecords) -> None:
    assert newest_endpoint(records.situation(), "7.0") is None
    first = FencedRecords(records, "7.0", 1, place(1), None)
    assert first.claim()
    assert first.write_round(TABLE)
    assert FencedRecords(records, "7.0", 2, place(2), 0).claim()
    assert newest_endpoint(records.situation(), "7.0") == place(2)
