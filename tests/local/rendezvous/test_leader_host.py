"""The leaders of one agent, one after the other."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.election.campaign import Campaign
from slurm_elastic.rendezvous.election.events import Event, LeaderEnded
from slurm_elastic.rendezvous.election.leader_host import LeaderHost
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rendezvous.transport.session import Role, Session
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

    async def campaign() -> Event:
        ended: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        listener = socket.create_server(("127.0.0.1", 0))
        host = LeaderHost(listener, make, lambda: Session(Role.LEADER, SECRET, "7.0", idle="n1/7.0/1"), None)
        await host.open(ended.set_result)
        host.lead(3, Campaign(1, Settings(1, 1, claimed=claimed), None))
        event = await asyncio.wait_for(ended, HANG)
        await host.close(0)
        return event

    with caplog.at_level(logging.INFO, "slurm_elastic"):
        assert asyncio.run(campaign()) == LeaderEnded(3, "")
    assert caplog.messages == lines
