from __future__ import annotations

import http.server
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slurm_elastic.agent import notification
from slurm_elastic.agent.features import RunningRound
from slurm_elastic.agent.notification import Notification, NotifyFeature, Watch, deliver
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.failures.history import Loop
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir, RunDirError
from tests.local.waiting import eventually, meanwhile
from tests.unit.agent.test_attribution import PLACED

Look = tuple[bool, int | None]
"""Whether the agent leads, and the steps of its workers."""
FORMED = Entry("round_formed", "", {"round": 3})
ENDED = Entry("round_ended", "")
FINISHED = Notification("finished", "the run succeeded", {"outcome": "succeeded"}, key="finished")


def told(*events: tuple[float, Entry | Look], after: float = 100.0) -> list[tuple[float, str, str]]:
    """Time, event and key of each notification when it comes first; the agent begins at 0."""
    watch, found = Watch("7.0", after, 0.0), dict[str, tuple[float, str, str]]()
    for now, event in events:
        told_now = watch.happened(event, now) if isinstance(event, Entry) else watch.look(*event, now)
        if told_now is not None:
            found.setdefault(told_now.key, (now, told_now.event, told_now.key))
    return [*found.values()]


def looks(*times: float, leads: bool = True, steps: int | None = None) -> list[tuple[float, Look]]:
    return [(now, (leads, steps)) for now in times]


def test_a_run_that_waits_for_nodes_from_the_start() -> None:
    assert told(*looks(5, 99, 100, 105, 300)) == [(100, "waiting", "waiting.7.0.none")]


def test_each_wait_is_told_of() -> None:
    events = [(10, FORMED), *looks(200), (300, ENDED), (350, ENDED), *looks(399, 400, 500)]
    assert told(*events) == [(400, "waiting", "waiting.7.0.3")]
    assert told(*events, (600, Entry("round_formed", "", {"round": 4})), (700, ENDED), *looks(800)) == [
        (400, "waiting", "waiting.7.0.3"),
        (800, "waiting", "waiting.7.0.4"),
    ]


def test_an_agent_that_does_not_lead_tells_nothing_and_knows_when_it_leads() -> None:
    assert told(*looks(100, 200, leads=False), *looks(205)) == [(205, "waiting", "waiting.7.0.none")]


def test_no_progress_counts_from_the_last_step() -> None:
    events = [(10, FORMED), *looks(15, steps=4), *looks(105, steps=5), *looks(204, 205, 210, 400, steps=5)]
    assert told(*events) == [(205, "no_progress", "no_progress.3.5")]
    assert told(*events, *looks(410, steps=6), *looks(510, steps=6)) == [
        (205, "no_progress", "no_progress.3.5"),
        (510, "no_progress", "no_progress.3.6"),
    ]


def test_workers_that_report_no_steps_make_no_progress_that_could_be_missed() -> None:
    assert told((10, FORMED), *looks(500)) == []


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("succeeded", ("finished", "finished")),
        ("closed", ("finished", "finished")),
        ("failed", ("failed", "failed.7.0.3")),
        ("timed_out", ("failed", "failed.7.0.3")),
    ],
)
def test_the_end(outcome: str, expected: tuple[str, str]) -> None:
    assert told((10, FORMED), (20, Entry("run_ended", "", {"outcome": outcome}))) == [(20, *expected)]


def delivered(base: Path, target: str) -> None:
    deliver(target, RunDir.for_run(base, "7").open(), "n1", FINISHED, 30.0)


def test_a_command_gets_json_once_whichever_agent_leads(tmp_path: Path) -> None:
    for _ in range(2):
        delivered(tmp_path, f"cat >> {tmp_path}/told")
    record = json.loads((tmp_path / "told").read_text())
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "event": "finished",
        "node": "n1",
        "schema": 1,
        "run": "7",
        "directory": str(tmp_path / "elastic-runs" / "7"),
        "text": "the run succeeded",
        "outcome": "succeeded",
    }


def test_a_url_gets_it_by_post(tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Content-Type"], content))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server, meanwhile(server.handle_request):
        delivered(tmp_path, f"http://127.0.0.1:{server.server_port}/hook")
    ((kind, content),) = got
    assert kind == "application/json"
    assert json.loads(content)["event"] == "finished"


def test_a_command_has_its_time_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin = time.monotonic()
    deliver("sleep 300", RunDir.for_run(tmp_path, "7").open(), "n1", FINISHED, 0.2)
    assert time.monotonic() - begin < 9
    assert "the notification 'finished' was not delivered: the command took too long and was killed" in caplog.text


@pytest.mark.parametrize("target", ["exit 3", "/nonexistent", "http://127.0.0.1:9/", "http://[", "https://"])
def test_what_fails_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str) -> None:
    delivered(tmp_path, target)
    (record,) = caplog.records
    assert "the notification 'finished' was not delivered: " in record.getMessage()


def test_the_leader_tells_of_loops_once(
    tmp_path: Path, run_dir: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    loop = Loop("node_flapping", "n2 was lost and has joined again 4 times in 6 h", "leave it out", 86400.0, ("n2",))

    def loops(*_: object) -> list[Loop]:
        calls.append(None)
        if len(calls) == 1:
            raise RunDirError("events: Input/output error")
        return [loop]

    settings = OptionValues(notify=f"cat >> {tmp_path}/told", notify_after=0.04)
    leads: list[bool] = []
    monkeypatch.setattr(notification, "find_loops", loops)
    monkeypatch.setattr(notification, "_LOOP_INTERVAL", 0.0)
    run = cast(RendezvousConfig, SimpleNamespace(run_dir=run_dir, node="n1", incarnation="7.0"))
    feature = NotifyFeature(settings, run, lambda: bool(leads))
    feature.workers_started(RunningRound(PLACED, {}, {}, tuple))
    time.sleep(0.1)
    assert not calls
    leads.append(True)
    eventually(lambda: len(calls) > 4)
    feature.close()
    (record,) = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert (record["event"], record["loop"], record["nodes"], record["advice"]) == (
        "loop",
        "node_flapping",
        ["n2"],
        "leave it out",
    )
    assert [path.name for path in (tmp_path / "elastic-runs/7/notified").iterdir()] == ["loop.node_flapping.n2.1.json"]
    assert caplog.messages == ["the events of the run cannot be read: events: Input/output error"]
