"""A node of four with a twentieth of a processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.cgroups import cpu_limit
from tests.planted_faults import planted

PACING = Path(__file__).parents[1] / "local" / "agent" / "pacing.py"
SHARE = 0.05
"""All nodes share two processors with the rest of the machine: with less of a limit the others may be as slow."""

OPTIONS = ("--learn-imports=off", "--rdzv-conf=heartbeat_limit=20")
"""The agent of the slow node is slow, too."""


@pytest.mark.nightly
def test_a_node_with_a_cpu_limit_is_named(jobs):
    jobs.place(PACING)
    job = jobs.submit("--nodes=4", "elastic.sbatch", *OPTIONS, "pacing.py", "10")
    job.wait_until("no checkpoint", lambda: (job.directory / "model.pt").exists())
    pids = [each.pid for each in jobs.cluster.processes("n3") if "pacing.py" in each.command]
    with cpu_limit(pids, SHARE):
        # Six looks, 10 s apart.
        job.wait_until("no rank is named", lambda: job.events("rank_slow"), timeout=120)
        # As an ordinary user on the login node.
        told = jobs.ask("status", job.id, "--json", check=False)
    (job.directory / "finish").touch()
    job.wait_for("COMPLETED")

    status = json.loads(told.stdout)
    assert [(slow["rank"], slow["node"]) for slow in status["slow"]] == [(2, "n3")]
    scores = {score["rank"]: score["relative_score"] for score in status["scores"]}
    assert min(scores, key=scores.__getitem__) == 2
    assert {(event["rank"], *event["nodes"]) for event in job.events("rank_slow")} == {(2, "n3")}
    assert job.action() == planted("a node with a twentieth of a processor").action
