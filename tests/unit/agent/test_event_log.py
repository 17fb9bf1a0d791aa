"""Events that people are told of."""

from __future__ import annotations

import json
import logging

import pytest

from slurm_elastic.agent.event_log import EventLog, FactLines
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir
from tests.local.waiting import eventually


def test_a_loss_that_no_round_follows_is_told_when_events_settle(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slurm_elastic.agent.event_log._SETTLE", 0.01)
    caplog.set_level(logging.INFO, "slurm_elastic")
    events = EventLog(run_dir, "n1", facts=FactLines("7", 0))
    events.add(Entry("node_lost", "lost n2: silent", {"nodes": ["n2"], "why": "silent"}))
    eventually(lambda: "n2 lost (silent): waits for other nodes" in caplog.messages)
    events.close()
    # Programs read the event as it is.
    (line,) = (run_dir.path / "events" / "n1.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "lost n2: silent"
