"""The control page of a rehearsal: what it writes down, and where it waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_elastic.control.agent_side import RoundControl
from slurm_elastic.control.worker_side import RECORDING, WorkerControl, attach
from slurm_elastic.rehearsal.facts import WorkerSeen
from slurm_elastic.rehearsal.files import Recordings
from tests.local.waiting import eventually, meanwhile

WORKER = {"SLURM_ELASTIC_ROUND": "3", "RANK": "1", "WORLD_SIZE": "2", "SLURM_ELASTIC_NODE": "node1"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "mishaps.json").write_text("[2, 5]")
    return tmp_path


def recorded(directory: Path) -> tuple[RoundControl, WorkerControl]:
    control = RoundControl(directory / "pages", 3, 1)
    worker = attach({**WORKER, **control.environment(0), RECORDING: str(directory)})
    assert worker is not None
    return control, worker


def seen(directory: Path) -> WorkerSeen:
    recordings = Recordings(directory)
    assert recordings.read()
    (found,) = recordings.workers()
    return found


def waits(directory: Path) -> int | None:
    """The mishap that the worker waits for now."""
    last = json.loads((directory / "000003.000001.jsonl").read_bytes().splitlines()[-1])
    return last["mishap"] if last["event"] == "waits" else None


def test_what_a_worker_does_is_written_down(directory: Path) -> None:
    (directory / "mishaps.json").write_text("[]")
    control, worker = recorded(directory)
    worker.record_samples(0, [7, 9])
    worker.report(1, 0.5)
    worker.ask(1)
    worker.report_checkpoint(1)
    control.hold()
    control.stop_at(2, "preempted", 20)
    stop = worker.ask(2)
    assert stop is worker.ask(2) is not None
    assert stop.reason == "preempted"
    found = seen(directory)
    assert (found.round, found.rank, found.node) == (3, 1, "node1")
    assert found.steps == [1, 2]
    assert (found.losses, found.samples) == ({1: 0.5}, [(1, 0, 7), (1, 0, 9)])
    assert found.checkpoints == [1]
    assert found.stop is not None
    assert found.asked.startswith(f"{__file__}:")
    (progress,) = control.progress()
    assert (progress.boundary, progress.loss, progress.checkpoint) == (2, 0.5, 1)


def test_a_worker_waits_where_a_mishap_is_due_until_it_has_happened(directory: Path) -> None:
    control, worker = recorded(directory)
    worker.ask(1)
    with meanwhile(lambda: worker.ask(2)):
        eventually(lambda: waits(directory) == 0)
        assert control.progress()[0].boundary == 1
        (directory / "done.0").touch()
    assert control.progress()[0].boundary == 2
    # The pause does not count the wait.
    worker.ask(3)
    assert waits(directory) is None


def test_a_worker_that_waits_stops_when_its_agent_wants_it(directory: Path) -> None:
    control, worker = recorded(directory)
    (directory / "done.0").touch()
    # It may come to its next call before the agent has looked: then it stops there.
    with meanwhile(lambda: [worker.ask(step) for step in (5, 6)]) as answers:
        eventually(lambda: waits(directory) == 1)
        control.stop_at(control.hold() or 0, "node_joined")
    assert {str(stop.reason) for stop in answers[0] if stop is not None} == {"node_joined"}


def test_a_worker_that_was_paused_is_told_to_save_too_late(directory: Path) -> None:
    _, worker = recorded(directory)
    worker.ask(1)
    worker.report_checkpoint(1)
    with meanwhile(lambda: worker.ask(2)) as answers:
        eventually(lambda: waits(directory) == 0)
        (directory / "save.0").write_text("node1")
        (directory / "done.0").touch()
    worker.report_checkpoint(2)
    found = seen(directory)
    assert [str(stop.reason) for stop in answers if stop is not None] == ["preempted"]
    assert (found.woken, found.late, found.checkpoints) == (True, [2], [1])
    assert found.stop is None


def test_a_line_that_is_cut_short_is_left_out(directory: Path) -> None:
    (directory / "mishaps.json").write_text("[]")
    _, worker = recorded(directory)
    worker.ask(1)
    with (directory / "000003.000001.jsonl").open("ab") as file:
        file.write(b'{"at": 1, "even')
    assert seen(directory).last_step == 1
    worker.ask(3)
    worker.ask(4)
    assert seen(directory).last_step == 4
    (directory / "000004.000000.jsonl").touch()
    assert seen(directory).last_step == 4


def test_a_worker_of_which_it_is_not_known_who_it_is_is_left_out(directory: Path) -> None:
    (directory / "mishaps.json").write_text("[]")
    _, worker = recorded(directory)
    worker.ask(1)
    path = directory / "000003.000001.jsonl"
    path.write_bytes(path.read_bytes()[9:])
    recordings = Recordings(directory)
    assert recordings.read()
    assert (recordings.workers(), recordings.waiting(), recordings.of_round(3)) == ((), (-1, 0, 0), [])


def test_a_line_counts_once_its_end_is_there(directory: Path) -> None:
    (directory / "mishaps.json").write_text("[]")
    _, worker = recorded(directory)
    worker.ask(1)
    path = directory / "000003.000001.jsonl"
    written = path.read_bytes()
    recordings = Recordings(directory)
    path.write_bytes(written[:-9])
    assert recordings.read()
    assert recordings.workers()[0].last_step is None
    path.write_bytes(written)
    assert (recordings.read(), recordings.read()) == (True, False)
    assert recordings.workers()[0].last_step == 1
