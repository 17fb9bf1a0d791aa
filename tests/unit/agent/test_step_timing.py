"""The feature that measures paces and names slow ranks: what it reads, what it says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from slurm_elastic.agent.features import RunningRound
from slurm_elastic.agent.health.pages import live_report
from slurm_elastic.agent.health.state import AgentState, Readings, RoundInfo, Stage
from slurm_elastic.agent.step_timing import StepTimingFeature, paces_of, slow_event
from slurm_elastic.control.agent_side import TimeUse, WorkerProgress
from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.observe.records import Event
from slurm_elastic.observe.status import rank_scores, slow_by_round, slow_ranks
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.slow_ranks import LOOKS, Pace, Score, SlowRank
from tests.local.waiting import eventually
from tests.unit.agent.helpers.rounds import placed

A, B = "n1/7.0/1", "n2/7.0/2"
PLACED = placed("n1")
SLOW = SlowRank(1, Pace(1.0, 0.9, 0.1, 0.1, 0.5, 8), Score(0.5, 0.556, 0.45))


def report(rank: int, pace: Pace | None, round_: int = 3) -> str:
    round_info = RoundInfo(replace(PLACED, round=round_, place=replace(PLACED.place, base_rank=rank)), {0: 100})
    state = AgentState("7", "n", "7", "n", since=0.0, stage=Stage.TRAINING, round_info=round_info)
    progress = [WorkerProgress(0, True, 9, 9, None, 0.1, False, 9.0, 1)]
    return live_report(state, Readings(10.0, progress=progress, paces={} if pace is None else {0: pace}), {})


def test_paces_travel_in_reports() -> None:
    pace = Pace(1.0, 0.25, 0.125, 0.75, 0.2, 4)
    texts = {A: report(0, pace), B: report(1, replace(pace, busy=0.5)), "n3/7.0/3": report(2, None)}
    assert paces_of(texts, 3) == ({0: pace, 1: replace(pace, busy=0.5)}, {0: "n1", 1: "n2", 2: "n3"})
    assert paces_of(texts, 4) == ({}, {}), "of another round"
    assert [(each.rank, each.node, each.relative_score) for each in rank_scores(texts, 3)] == [
        (0, "n1", 1.0),
        (1, "n2", 0.5),
    ]
    assert rank_scores(texts, 4) == ()


def test_reports_that_cannot_be_read_are_left_out() -> None:
    half = json.dumps({"round": 3, "state": "training", "workers": [{"rank": 5, "busy_seconds": "x"}]})
    texts = {A: report(0, SLOW.pace), B: "{", "n3/7.0/3": "[]", "n4/7.0/4": half, "n5/7.0/5": "{}"}
    assert list(paces_of(texts, 3)[0]) == [0]


def test_the_event_of_a_slow_rank() -> None:
    entry = slow_event(3, "n2", SLOW)
    assert entry.event == "rank_slow"
    assert entry.text == (
        "rank 1 on n2 is slow and holds up the others: "
        "it works 0.9 s per step outside of collectives, the others 0.45 s"
    )
    assert entry.fields["relative_score"] == 0.5
    assert (entry.fields["rank"], entry.fields["nodes"], entry.fields["round"]) == (1, ["n2"], 3)
    hungry = replace(SLOW, pace=replace(SLOW.pace, loading=0.5))
    assert slow_event(3, "n2", hungry).text.endswith("; it waits 0.5 s of that for input")
    over = slow_event(3, "n2", replace(SLOW, over=True))
    assert (over.event, over.text.partition(":")[0]) == ("rank_fast", "rank 1 on n2 is slow no more")


def test_slow_ranks_are_read_from_events() -> None:
    def event(at: float, entry: Entry) -> Event:
        return Event(at, entry.event, "n1", "", entry.text, entry.fields)

    over = replace(SLOW, over=True)
    again = [
        event(1, slow_event(3, "n2", SLOW)),
        event(5, slow_event(3, "n2", over)),
        event(9, slow_event(3, "n2", SLOW)),
    ]
    assert [(each.since, each.until) for each in slow_by_round(again)[3]] == [(1, 5), (9, None)]
    assert [(each.rank, each.node, each.since) for each in slow_ranks(again, 3)] == [(1, "n2", 9)]
    assert slow_ranks(again, 4) == ()
    assert slow_ranks(again[:2], 3) == ()


class Run:
    """A round of two ranks, of which this agent has rank 0."""

    def __init__(self, base_rank: int = 0) -> None:
        self.recorded: list[Entry] = []
        self.asked = 0
        self.fails = threading.Event()
        self._began = time.monotonic()
        placed = replace(PLACED, place=replace(PLACED.place, base_rank=base_rank))
        self.running = RunningRound(placed, {0: 100}, {}, self.progress)
        self.feature = StepTimingFeature(self.reports, lambda entry, level: self.recorded.append(entry), 0.02)

    def paces(self) -> Mapping[int, Pace]:
        return self.feature.status(Readings(0.0)).paces

    def progress(self) -> list[WorkerProgress]:
        seconds = time.monotonic() - self._began
        use = TimeUse(0.5 * seconds, 0.0, 0.0, 0.0)
        return [WorkerProgress(0, True, int(seconds * 1000), 1, None, 0.0, False, seconds, 1, since_first=use)]

    def reports(self) -> Mapping[str, str]:
        self.asked += 1
        if self.fails.is_set():
            raise SlurmElasticError("the leader changes")
        pace = self.paces()[0]
        return {A: report(0, pace), B: report(1, replace(pace, busy=2 * pace.busy))}


def test_the_agent_of_rank_0_names_a_slow_rank_once() -> None:
    run = Run()
    run.fails.set()
    run.feature.workers_started(run.running)
    eventually(lambda: run.asked >= 2)
    run.fails.clear()
    eventually(lambda: run.recorded)
    asked = run.asked
    eventually(lambda: run.asked >= asked + 2 * LOOKS)
    assert [(each.event, each.fields["nodes"]) for each in run.recorded] == [("rank_slow", ["n2"])]
    assert [each.rank for each in run.feature.status(Readings(0.0)).slow] == [1]
    run.feature.round_ended(())
    eventually(lambda: run.feature.status(Readings(0.0)) == Readings(0.0))
    run.feature.run_ended()
    asked = run.asked
    time.sleep(0.1)
    assert run.asked == asked


def test_other_agents_measure_and_ask_nobody() -> None:
    run = Run(base_rank=1)
    run.feature.workers_started(run.running)
    pace = eventually(run.paces)[0]
    assert 0.3 < pace.busy / pace.step < 0.7
    run.feature.workers_started(Run(base_rank=1).running)
    assert run.paces() == {}, "of workers of another round"
    run.feature.run_ended()
    assert run.asked == 0
