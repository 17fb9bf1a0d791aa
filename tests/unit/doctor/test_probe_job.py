"""The wait for the doctor's job, with a controller that answers as the test says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slurm_elastic.cli._run_view import signals_as_ctrl_c
from slurm_elastic.doctor.facts import NodeFacts, ProbeResult, RunDirFacts, SiteFacts, SlurmFacts
from slurm_elastic.doctor.probe import result_name
from slurm_elastic.doctor.probe_job import OUTPUT, with_results
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


SITE = SiteFacts(NodeFacts("login"), SlurmFacts(), RunDirFacts("/home"), job="7")


def test_results_are_collected_when_the_job_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running, run_dir = view("RUNNING", "n1", "n2"), RunDir.for_run(tmp_path, "doctor-1").open()
    controller = Scripted(view("PENDING", reason="Resources"), running, view("COMPLETED", "n1", "n2"))
    for node in ("n1", "n2"):
        run_dir.publish_record(msgspec.to_builtins(ProbeResult(NodeFacts(node))), result_name(node))
    found = with_results(SITE, run_dir, controller)
    assert [each.facts.node for each in found.results] == ["n1", "n2"]
    assert capsys.readouterr().err == "slurm-elastic: job 7 waits (Resources)\nslurm-elastic: job 7 runs on n1, n2\n"
    assert (found.expected, found.partition, found.qos) == (("n1", "n2"), "gpu", "low")


@pytest.mark.parametrize("content", [b'{"facts":', b'{"facts": 3}'])
def test_a_damaged_result_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("slurm_elastic.doctor.probe_job._AFTER_THE_END", 0.0)
    run_dir = RunDir.for_run(tmp_path, "doctor-1").open()
    (run_dir.path / f"{result_name('n1')}.json").write_bytes(content)
    run_dir.publish_record({"facts": 3}, result_name("n2"))
    (run_dir.path / OUTPUT).write_text("srun: cluster configuration lacks support for cpu binding\nno torch\n")
    found = with_results(SITE, run_dir, Scripted(view("COMPLETED", "n1", "n2")))
    assert (found.results, found.job_output) == ((), ("no torch",))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_job_is_cancelled_when_the_doctor_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    controller = Scripted(*[view("PENDING")] * 1000)
    monkeypatch.setattr(controller, "is_queued", lambda job_id: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt), signals_as_ctrl_c():
        with_results(SITE, RunDir.for_run(tmp_path, "doctor-1").open(), controller)
    assert controller.cancelled == ["7"]
