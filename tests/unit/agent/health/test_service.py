"""What is published about health ports in the run directory."""

from __future__ import annotations

import threading

import pytest

from slurm_elastic.agent.health.server import withdraw_lost
from slurm_elastic.rundir import RunDir


def test_the_target_of_a_lost_agent_is_withdrawn(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    for node in ("n1", "n2"):
        run_dir.publish_health(node, "7", b"[]")
    withdraw_lost(run_dir, "n2/7.0/4711")
    for thread in threading.enumerate():
        if thread.name == "slurm-elastic-health-file":
            thread.join()
    assert [path.name for path in (run_dir.path / "health").iterdir()] == ["n1.7.json"]
    assert caplog.text == ""
