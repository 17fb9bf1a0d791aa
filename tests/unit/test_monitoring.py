"""What docs/monitoring and docs/howto/monitoring.md say of the metrics is so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurm_elastic.agent.health.metrics import metrics_page
from slurm_elastic.agent.health.state import AgentState, Readings, RoundInfo, Stage, enter
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.slow_ranks import Pace, Score, SlowRank

DOCS = Path(__file__).parents[2] / "docs"
_METRIC = re.compile(r"\bslurm_elastic_[a-z_]+\b(?:\{([^}]*)\})?")
_LABEL = re.compile(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*"')
_BY = re.compile(r"\bby \(([a-z_, ]+)\)")


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of every metric there is."""
    info = RoundInfo(Assignment(1, Place("n1", "n1", 0, 1, 0, "w", 0, 1), 0, Reason.START, 1, 1, "n1", 1, 0), {0: 1})
    state = AgentState("7", "n1", "7", "n1/7.0/1", 0.0, round_info=info, notices=("SIGTERM",))
    slow = (SlowRank(0, Pace(1.0, 1.0, 0.0, 0.0, 1.0, 1), Score(0.5, 1.0)),)
    progress = WorkerProgress(0, True, 1, 1, None, 1.0, False)
    readings = Readings(1.0, watchdog_age=0.0, progress=(progress,), slow=slow)
    page = metrics_page(enter(replace(state, changing_since=0.0), Stage.TRAINING, 0.5), readings).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    dashboard: dict[str, Any] = json.loads((DOCS / "monitoring/grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], ""
    for line in (DOCS / "howto/monitoring.md").read_text().splitlines():
        if line.startswith("| `"):
            yield line.split("`")[1], ""


@pytest.mark.parametrize(("expression", "legend"), sorted(set(expressions())))
def test_every_metric_and_label_that_is_shown_exists(expression: str, legend: str, labels: dict[str, set[str]]) -> None:
    # The job's name in the scrape example is no metric.
    used = list(_METRIC.finditer(expression))
    assert used, expression
    of_all: set[str] = set()
    for metric in used:
        name = metric[0].partition("{")[0]
        assert name in labels, name
        of_all |= labels[name]
        assert set(_LABEL.findall(metric[1] or "")) <= labels[name]
    grouped = {label.strip() for group in _BY.findall(expression) for label in group.split(",")}
    assert grouped <= of_all
    assert set(re.findall(r"\{\{([a-z_]+)\}\}", legend)) <= (grouped or of_all)
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_shown(labels: dict[str, set[str]]) -> None:
    shown = {metric[0].partition("{")[0] for expression, _ in expressions() for metric in _METRIC.finditer(expression)}
    assert labels.keys() - shown <= {"slurm_elastic_" + name for name in ("round_change_seconds_created",)}


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DOCS / "monitoring/grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_scrape_example_names_the_files_of_a_run_directory() -> None:
    text = (DOCS / "monitoring/prometheus.yml").read_text()
    files = re.findall(r"/shared/project/(\S+)", text)
    assert files == ["elastic-runs/4711/health-token", "elastic-runs/4711/health/*.json"]
