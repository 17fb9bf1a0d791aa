from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurm_elastic.agent.health.metrics import metrics_page
from slurm_elastic.agent.health.pages import status_page
from slurm_elastic.agent.health.state import AgentState, Readings, RoundInfo, Stage, enter, lost_seconds
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.slow_ranks import Pace, Score, SlowRank
from tests.unit.agent.helpers.rounds import placed

PLACED = placed("n2", rank=1, workers=2, nodes=4, reason=Reason.NODE_LOST, restarts=1, members="n[1-4]")
START = AgentState("7", "n2", "7", "n2/7.0/1", since=10.0, changing_since=10.0, max_restarts=3)


def train(state: AgentState, now: float) -> AgentState:
    return enter(replace(state, round_info=RoundInfo(PLACED, {0: 100, 1: 101})), Stage.TRAINING, now)


def test_time_without_workers_is_lost_until_they_run() -> None:
    joining = enter(START, Stage.JOINING, 11.0)
    assert lost_seconds(joining, 13.0) == 3.0
    training = train(joining, 14.0)
    assert (lost_seconds(training, 20.0), training.lost, training.training) == (4.0, 4.0, 0.0)
    stopping = enter(training, Stage.STOPPING, 20.0)
    assert (lost_seconds(stopping, 21.0), stopping.training) == (5.0, 6.0)


@pytest.mark.parametrize("stage", [Stage.SPARE, Stage.DONE, Stage.LEAVING])
def test_whoever_has_nothing_to_train_loses_nothing(stage: Stage) -> None:
    assert lost_seconds(enter(START, stage, 11.0), 100.0) == 1.0


def test_a_round_change_lasts_from_the_end_of_training_to_its_beginning() -> None:
    training = train(START, 10.3)
    assert training.changes == (pytest.approx(0.3),)
    failed = enter(training, Stage.FAILED, 20.0)
    again = train(enter(enter(failed, Stage.STOPPING, 20.5), Stage.JOINING, 21.0), 1000.0)
    assert again.changes == (pytest.approx(0.3), pytest.approx(980.0))
    assert again.rounds == ("node_lost", "node_lost")


def test_the_status_page() -> None:
    state = replace(train(START, 14.0), notices=("SIGTERM",), kills=1, hangs=2)
    pace = Pace(1.0, 0.4, 0.1, 0.5, 0.2)
    readings = Readings(
        20.0,
        leader="n1",
        watchdog_age=0.25,
        progress=(WorkerProgress(0, True, 9, 118, None, 1.5, False, loss=math.inf),),
        paces={0: pace},
        slow=(SlowRank(7, pace, Score(0.625, 0.5, 0.25)),),
    )
    page = json.loads(status_page(state, readings))
    assert (page["run"], page["node"], page["state"], page["state_seconds"]) == ("7", "n2", "training", 6.0)
    assert page["round"] == {
        "number": 3,
        "reason": "node_lost",
        "members": 4,
        "nodes": "n[1-4]",
        "node_rank": 1,
        "world_size": 8,
        "ranks": [2, 3],
    }
    assert page["workers"][0] == {
        "rank": 2,
        "local_rank": 0,
        "pid": 100,
        "step": 118,
        "step_age_seconds": 1.5,
        "loss": "inf",
        "pace_seconds": 1.0,
        "busy_seconds": 0.4,
        "loading_seconds": 0.1,
        "waiting_seconds": 0.5,
        "individual_score": 0.5,
    }
    assert [(slow["rank"], slow["relative_score"], slow["busy_seconds"]) for slow in page["slow_ranks"]] == [
        (7, 0.625, 0.4)
    ]
    assert (page["workers"][1]["step"], page["workers"][1]["busy_seconds"]) == (None, None)
    assert (page["restarts"], page["restarts_left"], page["notices"]) == (1, 2, ["SIGTERM"])
    assert page["watchdog"] == {"age_seconds": 0.25, "hangs": 2, "kills": 1}
    assert (page["leader"], page["leads"], page["lost_seconds"]) == ("n1", False, 4.0)


def test_the_status_page_before_anything_happened() -> None:
    page = json.loads(status_page(START, Readings(10.0)))
    assert (page["state"], page["round"], page["workers"], page["watchdog"]) == ("starting", None, [], None)


def test_the_metrics_page_says_the_same() -> None:
    state = replace(train(START, 14.0), notices=("SIGTERM", "SIGTERM"), kills=1)
    readings = Readings(
        now=20.0,
        cpu_seconds=1.5,
        resident_bytes=1 << 20,
        leads=True,
        watchdog_age=0.25,
        ignored=5,
        rejected=6,
        steps=107,
        progress=(WorkerProgress(1, True, 7, 118, None, 1.5, False, loss=0.5),),
    )
    found = {}
    for family in text_string_to_metric_families(metrics_page(state, readings).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("node")) == ("7", "n2")
            found[(sample.name, *labels.values())] = sample.value
    prefix = "slurm_elastic_"
    expected = {
        ("agent_state", "training"): 1,
        ("agent_state", "joining"): 0,
        ("agent_leads",): 1,
        ("agent_cpu_seconds_total",): 1.5,
        ("agent_resident_memory_bytes",): 1 << 20,
        ("notices_total", "SIGTERM"): 2,
        ("rejected_records_total",): 6,
        ("round",): 3,
        ("members",): 4,
        ("world_size",): 8,
        ("workers",): 2,
        ("rounds_total", "node_lost"): 1,
        ("round_change_seconds_bucket", "2.5"): 0,
        ("round_change_seconds_bucket", "5.0"): 1,
        ("round_change_seconds_bucket", "+Inf"): 1,
        ("round_change_seconds_sum",): 4,
        ("training_seconds_total",): 6,
        ("lost_seconds_total",): 4,
        ("restarts_total",): 1,
        ("restarts_left",): 2,
        ("steps_total",): 107,
        ("worker_step", "3"): 118,
        ("worker_step_age_seconds", "3"): 1.5,
        ("worker_loss", "3"): 0.5,
        ("watchdog_kills_total",): 1,
        ("watchdog_ignored_requests_total",): 5,
        ("watchdog_age_seconds",): 0.25,
    }
    assert {(prefix + name, *labels): value for (name, *labels), value in expected.items()}.items() <= found.items()
