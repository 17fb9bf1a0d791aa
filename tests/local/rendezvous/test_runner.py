"""The leaders of one agent, one after the other."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.election.campaign import Campaign, ElectionConfig
from slurm_elastic.rendezvous.election.runner import Runner
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller
from tests.local.waiting import HANG

SECRET = bytes(range(32))


@pytest.mark.parametrize(
    ("claimed", "lines"), [(False, []), (True, ["this agent leads no more: another agent leads with a newer epoch"])]
)
def test_only_an_agent_that_has_led_says_that_another_one_leads(
    claimed: bool, lines: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = RunDirRecords(RunDir.for_run(tmp_path, "7").open(), "7.0")
    for epoch in (1, 2):
        assert records.claim_epoch(epoch, {"agent": f"n{epoch}/7.0/1"})

    def make(campaign: Campaign) -> Leader:
        fenced_records = FencedRecords(records, "7.0", campaign.term, {"agent": "n1/7.0/1"}, campaign.follows)
        return Leader("7.0", SECRET, campaign, fenced_records, lambda _decision: None, Controller())

    told: list[object] = []

    async def campaign() -> None:
        config = ElectionConfig(incarnation="7.0", settings=Settings(1, 1, agent="n1/7.0/1"), endpoints=())
        first = Campaign(1, Settings(1, 1, claimed=claimed), None)
        listening = socket.create_server(("127.0.0.1", 0))
        runner = Runner(config, SECRET, records, listening, make, first, told.append, lambda _dumps: (), lambda: "{}")
        await runner.open()
        deadline = time.monotonic() + HANG
        while runner.leader is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert runner.leader is None
        await runner.close(0)

    with caplog.at_level(logging.INFO, "slurm_elastic"):
        asyncio.run(campaign())
    assert told == []
    assert caplog.messages == lines
