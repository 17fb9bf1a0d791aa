"""The wait for the doctor's job, with a controller that answers as the test says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slurm_elastic.doctor.facts import NodeFacts, ProbeResult
from slurm_elastic.doctor.probe import result_name
from slurm_elastic.doctor.probe_job import ProbeJob
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller, JobView


class Scripted(Controller):
    """Answers with one view of the job after the other; the job has left the queue with the last one."""

    def __init__(self, *views: JobView) -> None:
        super().__init__()
        self._views: Iterator[JobView] = iter(views)
        self._left = len(views)
        self.cancelled: list[str] = []

    def job(self, job_id: str) -> JobView | None:
        self._left -= 1
        return next(self._views, None)

    def is_queued(self, job_id: str) -> bool | None:
        return self._left > 0

    def cancel(self, job_id: str) -> bool:
        self.cancelled.append(job_id)
        return True


def view(state: str, *nodes: str, reason: str | None = None) -> JobView:
    return JobView("7", None, None, state, reason, 0, False, None, None, nodes, partition="gpu", qos="low")


def submitted(base: Path, controller: Controller) -> tuple[ProbeJob, RunDir]:
    run_dir = RunDir.for_run(base, "doctor-1").open()
    job = ProbeJob(run_dir, controller)
    job.id = "7"
    return job, run_dir


def test_results_are_collected_when_the_job_is_over(tmp_path: Path) -> None:
    running = view("RUNNING", "n1", "n2")
    job, run_dir = submitted(
        tmp_path, Scripted(view("PENDING", reason="Resources"), running, view("COMPLETED", "n1", "n2"))
    )
    for node in ("n1", "n2"):
        run_dir.publish(result_name(node), msgspec.json.encode(ProbeResult(NodeFacts(node))))
    lines: list[str] = []
    assert [each.facts.node for each in job.wait(lines.append)] == ["n1", "n2"]
    assert lines == ["job 7 waits (Resources)", "job 7 runs on n1, n2"]
    assert (job.nodes, job.partition, job.qos) == (("n1", "n2"), "gpu", "low")


@pytest.mark.parametrize("content", [b'{"facts":', b'{"facts": 3}'])
def test_a_damaged_result_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("slurm_elastic.doctor.probe_job._AFTER_THE_END", 0.0)
    job, run_dir = submitted(tmp_path, Scripted(view("COMPLETED", "n1")))
    run_dir.publish(result_name("n1"), content)
    assert job.wait(lambda line: None) == ()
    job.output.write_text("srun: cluster configuration lacks support for cpu binding\nno torch\n")
    assert job.last_lines() == ("no torch",)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_job_is_cancelled_when_the_doctor_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    controller = Scripted(*[view("PENDING")] * 1000)
    job, _ = submitted(tmp_path, controller)
    with pytest.raises(KeyboardInterrupt):
        job.wait(lambda line: os.kill(os.getpid(), number))
    assert controller.cancelled == ["7"]
