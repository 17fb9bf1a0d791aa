"""The events of a run, sent to a receiver that reads OpenTelemetry's own messages."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.commands.report import log_requests
from tests.unit.observe.runs import START, WrittenRun

A = "n1/7.0/100"


@pytest.fixture
def told(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    run.started(0, A, seconds=0.5)
    run.round(1, 0, [A])
    fields = {"round": 0, "reason": "worker_failed", "nodes": ["n1"], "rank": 1, "step": None}
    run.event(11.5, "n1", "round_ended", "round 0 ends: rank 1 failed", **fields)
    monkeypatch.chdir(run.base)
    monkeypatch.setenv("PATH", "/nonexistent")
    return run


@contextlib.contextmanager
def receiver(*words: str) -> Iterator[tuple[str, IO[str]]]:
    pytest.importorskip("opentelemetry.proto")
    command = [sys.executable, str(Path(__file__).with_name("otlp_receiver.py")), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.stdout
        finally:
            process.terminate()


def attributes(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["key"]: each["value"] for each in found}


def test_each_event_is_a_log_record_with_its_fields(
    told: WrittenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=a%20b,other=c")
    with receiver() as (url, requests):
        assert main(["report", "7", "--otlp", f"{url}/"]) == 0
        seen = json.loads(requests.readline())
    assert "sent 4 events of run 7" in capsys.readouterr().err
    assert not list(told.base.glob("*.html"))
    assert seen["token"] == "a b"
    ((logs,),) = (seen["request"]["resourceLogs"],)
    run = {"service.name": {"stringValue": "slurm_elastic"}, "slurm_elastic.run": {"stringValue": "7"}}
    assert attributes(logs["resource"]["attributes"]) == run
    records = logs["scopeLogs"][0]["logRecords"]
    kinds = [each["eventName"].removeprefix("slurm_elastic.") for each in records]
    assert kinds == ["agent_started", "round_formed", "workers_started", "round_ended"]
    last = records[-1]
    assert last["timeUnixNano"] == str(int((START + 11.5) * 1e9))
    assert last["severityNumber"] == "SEVERITY_NUMBER_ERROR"
    assert last["body"] == {"stringValue": "round 0 ends: rank 1 failed"}
    assert attributes(last["attributes"]) == {
        "node": {"stringValue": "n1"},
        "round": {"intValue": "0"},
        "reason": {"stringValue": "worker_failed"},
        "nodes": {"arrayValue": {"values": [{"stringValue": "n1"}]}},
        "rank": {"intValue": "1"},
    }
    assert attributes(records[0]["attributes"])["seconds"] == {"doubleValue": 0.5}


def test_many_events_are_several_requests(told: WrittenRun) -> None:
    requests = list(log_requests(told.records(), most=3))
    assert [len(each["resourceLogs"][0]["scopeLogs"][0]["logRecords"]) for each in requests] == [3, 1]


def test_a_receiver_that_does_not_take_them_is_one_line(told: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    def said(url: str) -> str:
        capsys.readouterr()
        assert main(["report", "7", "--otlp", url]) == 2
        # Before it there is one that says that no Slurm answers here.
        return capsys.readouterr().err.splitlines()[-1]

    with receiver("partial") as (url, _):
        assert f"{url} has refused some of the events: 1 of them, too old; see the log" in said(url)
        assert "has not taken the events: HTTP Error 404: Not Found; --otlp takes the base URL" in said(f"{url}/other")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert "Connection refused" in said(f"http://127.0.0.1:{port}")
    assert "--otlp 'collector:4318' is no URL" in said("collector:4318")
