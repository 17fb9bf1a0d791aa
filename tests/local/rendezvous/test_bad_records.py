"""Records that cannot be used in the moment in which a leader has to be followed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.rendezvous.election.events import LeaderLost
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.events import Interrupted
from slurm_elastic.rendezvous.records.api import RunDirRecords, Situation
from slurm_elastic.rundir import RunDir
from tests.local.agents import HANG
from tests.local.rendezvous.helpers.parties import Party, Run, form, leader_of
from tests.local.rendezvous.test_failover import places_after

StartRun = Callable[..., Run]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which can be filled or made read-only."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["/bin/umount", "--lazy", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def make_read_only(disk: Path) -> None:
    subprocess.run(["/bin/mount", "-o", "remount,ro", disk], check=True)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [(fill, "the file system is full; free some space"), (make_read_only, "the file system is mounted read-only")],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_epoch_is_said_in_one_line(
    start_run: StartRun, small_disk: Path, spoil: Callable[[Path], None], line: str
) -> None:
    parties = start_run(small_disk).formed(2)
    spoil(small_disk)
    parties[0].die()
    assert parties[1].hear(Interrupted).reason is Reason.NODE_LOST
    parties[1].join()
    why = parties[1].hear_after(LeaderLost).why
    assert line in why
    assert "\n" not in why


class Slow(RunDirRecords):
    """A file system that does not answer until it is released."""

    released: threading.Event

    def situation(self, known_round: int | None = None) -> Situation:
        self.released.wait(HANG)
        return super().situation(known_round)


def party_with(run: Run, position: int, records: RunDirRecords) -> Party:
    """The agent of a node that has records of its own."""
    node = f"node{position + 1}"
    config = dataclasses.replace(run.config, node=node, agent=f"{node}/7.0/{position}", position=position)
    party = Party(dataclasses.replace(config, **{**run.settings, "records": records}))
    run.parties.append(party)
    return party


def test_a_successor_whose_file_system_hangs_joins_the_next_one(start_run: StartRun) -> None:
    run = start_run(expected_nodes=("node1", "node2", "node3"))
    records = Slow(run.run_dir, "run.0")
    records.released = threading.Event()
    records.released.set()
    parties = [run.party(0), party_with(run, 1, records), run.party(2)]
    form(parties)
    records.released.clear()
    parties[0].die()
    places = places_after(parties[1:])
    assert leader_of(parties[1:]) is parties[2]
    assert {place.nodes for place in places} == {2}
    records.released.set()
    # What comes of its reading then is of no use any more.
    time.sleep(0.1)
    assert [party.link.leads for party in parties[1:]] == [False, True]


def test_an_agent_whose_directory_is_not_that_of_the_run_does_not_lead(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(expected_nodes=("node1", "node2", "node3"))
    leader = run.party(0)
    mount, other = tmp_path / "mount", tmp_path / "other"
    other.mkdir()
    mount.symlink_to(tmp_path)
    second = party_with(run, 1, RunDirRecords(RunDir.for_run(mount, "run"), "run.0"))
    third = run.party(2)
    form([leader, second, third])
    # Its mount is replaced, as by one of this node's own.
    RunDir.for_run(other, "run").open()
    mount.unlink()
    mount.symlink_to(other)
    leader.die()
    places = places_after([second, third])
    assert leader_of([second, third]) is third
    assert {place.nodes for place in places} == {2}
    assert not list(other.glob("elastic-runs/*/rounds/*.json"))
    told = [record.message for record in caplog.records if "this agent cannot campaign to lead" in record.message]
    assert len(told) == 1
    assert "shows no round 0" in told[0]


@pytest.mark.parametrize("record", ["epochs/run.0/*.json", "endpoints/run.0.json"])
def test_a_record_of_an_epoch_or_an_endpoint_that_is_cut_short_stops_nobody(start_run: StartRun, record: str) -> None:
    run = start_run()
    parties = run.formed(3)
    # As after a power loss of the file server. Nor do times of files matter.
    (torn,) = run.run_dir.path.glob(record)
    torn.write_text('{"agent": "no')
    for path in run.run_dir.path.rglob("*.json"):
        os.utime(path, (time.time() + 7 * 3600, time.time() - 7 * 3600))
    parties[0].die()
    assert {place.nodes for place in places_after(parties[1:])} == {2}
