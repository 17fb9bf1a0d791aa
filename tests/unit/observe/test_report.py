from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slurm_elastic.observe.page import html_comparison, html_page
from slurm_elastic.observe.report import Report, chrome_trace, report, report_json
from slurm_elastic.observe.status import run_status
from tests.conftest import Cli
from tests.unit.observe.runs import START, WrittenRun
from tests.unit.observe.test_goodput import steps

A, B = "n1/7.0/100", "n2/7.0/200"


@pytest.fixture
def _in_the_directory(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.base)
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def told(run: WrittenRun) -> WrittenRun:
    """Two nodes; one is lost, the other goes on from a checkpoint and finishes."""
    for agent in (A, B):
        run.started(0, agent, seconds=0)
    run.round(0.9, 0, [A, B])
    run.progress(6, A, "progress", round=0, **steps(1, 50, 0.0, 5.0))
    cause = "round 0 ends: node lost, n2 (<b>& its connection broke)"
    run.event(11, "n1", "node_lost", "lost n2", nodes=["n2"], why="", silent_for=0.3)
    run.event(11, "n1", "round_ended", cause, round=0, reason="node_lost", nodes=["n2"], detail="")
    run.ended(12, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0))
    run.round(12.9, 1, [A], "node_lost")
    run.ended(23, 1, [A], 13.0, **steps(81, 180, 0.0, 10.0))
    run.progress(23, A, "agent_ended", exit_code=0)
    run.run_dir.mark_done({"outcome": "succeeded"})
    return run


def made(run: WrittenRun) -> Report:
    records = run.records()
    return report(records, run_status(records, START + 100), START + 100)


def test_rounds_have_their_causes_and_their_steps(told: WrittenRun) -> None:
    found = json.loads(json.dumps(report_json(made(told))))
    first, second = found["rounds"]
    assert (first["nodes"], first["redone_steps"], first["calls"], first["cause"]) == (["n1", "n2"], 20, 100, "")
    assert second["cause"].startswith("round 0 ends: node lost, n2")
    assert (second["first_step"], second["last_step"], second["steps_per_second"]) == (81, 180, 9.9)
    assert found["goodput"]["node_seconds"] == pytest.approx(23 + 11)
    assert sum(found["goodput"]["seconds"].values()) == pytest.approx(found["goodput"]["node_seconds"])
    assert found["goodput"]["share"] == pytest.approx(26 / 34)
    assert found["goodput"]["without_planned_stops"] == {"redone_steps": 20, "share": found["goodput"]["share"]}
    assert list(found["starts"]) == ["0"]


def test_nodes_of_a_failure_domain_are_beside_each_other(run: WrittenRun) -> None:
    names = {"n1": "s2", "n2": "<s10>", "n3": "s2"}
    agents = [f"{node}/7.0/100" for node in names]
    for agent, switch in zip(agents, names.values(), strict=True):
        run.started(0, agent, domain=switch)
    run.round(1, 0, agents)
    assert report_json(made(run))["domains"] == names
    text = html_page(made(run))
    assert re.findall(r'<text x="0"[^>]*>(n.*?)</text>', text) == [
        "n2<title>&lt;s10&gt;</title>",
        "n1<title>s2</title>",
        "n3<title>s2</title>",
    ]
    assert text.count('<line class="domain"') == 1


def test_the_samples_are_between_records(told: WrittenRun) -> None:
    samples = [(round(at - START, 2), round(speed, 2)) for at, speed in made(told).samples]
    assert samples == [(3.5, 9.8), (8.5, 10.0), (18.0, 9.9)]


def test_the_trace_follows_the_trace_event_format(told: WrittenRun) -> None:
    """Google, Trace Event Format, "JSON Object Format" and "Event Descriptions".

    Perfetto's own trace processor is a program that its Python package downloads.
    """
    trace = json.loads(json.dumps(chrome_trace(made(told))))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert [type(event[key]) for key in ("name", "pid", "tid")] == [str, int, int]
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "M":
            assert [*event["args"]] == ["sort_index" if event["name"] == "process_sort_index" else "name"]
        else:
            assert min(event["ts"], event.get("dur", 0)) >= 0
            assert "dur" in event or event["s"] in ("g", "p", "t")
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in complete if event["cat"] != "rank") == 34_000_000
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    # Of the ranks of the lost agent nothing is known.
    assert sorted(threads.values()) == [A, B, "rank 0", "rank 1"]
    of_rank_1 = [each for each in complete if threads[each["pid"], each["tid"]] == "rank 1"]
    # From the start of its workers to their end, and again; the first step came at once.
    assert [(each["name"], each["ts"] // 100_000, each["dur"] // 100_000) for each in of_rank_1] == [
        ("steps 1 to 100, round 0", 10, 100),
        ("end, round 0", 110, 10),
        ("steps 81 to 180, round 1", 130, 100),
    ]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {1: "n1", 2: "n2"}


def test_slices_of_a_thread_do_not_overlap_whatever_fractions_their_times_have(told: WrittenRun) -> None:
    found = made(told)

    def third(at: float) -> float:
        return found.start + (at - found.start) / 3

    segments = [replace(each, start=third(each.start), end=third(each.end)) for each in found.segments]
    # Of the first round alone: its slices follow one another.
    progress = tuple(replace(each, time=third(each.time)) for each in found.records.progress if not each.round)
    records = replace(found.records, progress=progress)
    trace = chrome_trace(replace(found, segments=tuple(segments), records=records))["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 2 + 2
    for slices in threads.values():
        slices.sort()
        assert [end for _, end in slices[:-1]] == [begin for begin, _ in slices[1:]]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole(text: str) -> _Page:
    """A page whose elements are all closed, and that runs nothing."""
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.seen
    return page


def test_the_page_is_whole_needs_no_network_and_quotes_what_others_wrote(told: WrittenRun) -> None:
    text = html_page(made(told))
    page = whole(text)
    assert {value for name, value in page.attributes if name in ("src", "href")} == {"data:,"}
    assert "url(" not in text
    assert "@import" not in text
    assert "&lt;b&gt;&amp; its connection broke" in text
    assert "76.5 %" in text
    assert "20 steps would have been taken again (20 were)" in text
    # The speed has a line for each round.
    assert text.partition("<h2>Steps per second</h2>")[2].partition("</svg>")[0].count("<polyline") == 2


def test_slow_ranks_are_named_by_round(told: WrittenRun) -> None:
    assert "Slow ranks" not in html_page(made(told))
    slow = {"round": 0, "rank": 3, "nodes": ["n2"], "relative_score": 0.4}
    told.event(5, "n1", "rank_slow", "rank 3 on n2 is slow <i>", **slow)
    told.event(7, "n1", "rank_fast", "rank 3 on n2 is slow no more", **slow)
    told.event(9, "n1", "rank_slow", "rank 3 on n2 is slow again", **slow)
    first, second = report_json(made(told))["rounds"]
    slow_ranks = [(each["rank"], each["node"], each["relative_score"], each["until"]) for each in first["slow_ranks"]]
    assert slow_ranks == [(3, "n2", 0.4, START + 7), (3, "n2", 0.4, None)]
    assert second["slow_ranks"] == []
    page = html_page(made(told))
    assert "rank 3 on n2 is slow &lt;i&gt;" in page
    assert page.count("the end of the round") == 1


def test_the_page_begins_with_state_and_cause_and_has_no_unknown_tiles(run: WrittenRun) -> None:
    run.started(0, A, seconds=0)
    run.round(0.9, 0, [A])
    run.progress(6, A, "progress", round=0, **steps(1, 50, 0.0, 5.0), loss=0.5)
    run.ended(11, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0), loss=-0.25)
    run.round(12.9, 1, [A], "worker_failed")
    run.ended(13, 1, [A], 13.0)
    run.progress(13, A, "agent_ended", exit_code=1)
    failure = {"agent": A, "node": "n1", "rank": 1, "exit_code": 1, "message": "ValueError: <bad>"}
    run.run_dir.publish_record(failure, "failures", "7.0")
    run.event(14, "n1", "run_ended", "the run failed", outcome="failed", nodes=["n1"], rank=1)
    page = html_page(made(run))
    places = [page.index(text) for text in ("run 7: failed", "job 7", "Root cause", "&lt;bad&gt;", 'class="cards"')]
    assert places == sorted(places)
    tiles = dict(re.findall(r'class="card"><span class="dim">(.*?)</span><b>(.*?)</b>', page))
    assert tiles["last step"] == "100"
    assert "unknown" not in tiles.values()
    assert page.count("<h2>Root cause</h2>") == 1
    assert "<h2>Loss</h2>" in page
    assert ">-0.25</text>" in page
    assert "spare" not in page.partition("Where the node time went")[2].partition("node time</th>")[0]


def test_a_page_of_a_run_that_has_just_begun(run: WrittenRun) -> None:
    run.started(0, A, seconds=0)
    whole(html_page(made(run)))


@pytest.mark.usefixtures("_in_the_directory")
def test_runs_side_by_side(told: WrittenRun, cli: Cli) -> None:
    other = WrittenRun(told.base, "8")
    other.started(0, A, seconds=0)
    other.round(0.9, 0, [A])
    other.ended(11, 0, [A], 1.0, **steps(1, 100, 0.0, 10.0))
    text = html_comparison([made(told), made(other)])
    page = whole(text)
    assert (page.seen["table"], page.seen["svg"]) == (1, 2)
    rows = dict(re.findall(r"<tr><td>([^<]+)</td>(.*?)</tr>", text))
    cells = {name: re.findall(r">([^<]*)</td>", row) for name, row in rows.items()}
    assert cells["last step"] == ["180", "100"]
    assert cells["nodes at most"] == ["2", "1"]
    assert cells["steps taken again"] == ["20", "0"]
    cli(0, "report 7 8")
    assert "2 runs" in Path("report-7-8.html").read_text()
    assert [each["run"] for each in json.loads(cli(0, "report 7 8 --json").out)] == ["7", "8"]
    assert "--trace is of one run; name one" in cli(2, "report 7 8 --trace t.json").err


@pytest.mark.usefixtures("_in_the_directory")
def test_the_command(told: WrittenRun, cli: Cli) -> None:
    cli(0, "report 7")
    assert Path("report-7.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(cli(0, "report 7 --json --trace t.json").out)["schema"] == 2
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    Path("report-7.html").unlink()
    cli(0, "report 7 --trace t.json")
    assert not Path("report-7.html").exists()
    for arguments, message in (
        (["--output=/nonexistent/x.html"], "/nonexistent/x.html cannot be written: No such file or directory"),
        (["--output=x", "--json"], "--json writes to stdout, --output a page; give one of them"),
    ):
        assert message in cli(2, "report 7", *arguments).err
    WrittenRun(told.base, "8")
    assert "run 8 has no records of progress" in cli(2, "report 8").err
