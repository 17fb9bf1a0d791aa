"""What a training script imports: nothing outside of a run, and its agent's page inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from slurm_elastic import ElasticState, elastic_state, trainer
from slurm_elastic.control.agent_side import RoundControl
from slurm_elastic.control.worker_side import unshield
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason

ROOT = Path(__file__).parents[2]


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RoundControl]:
    control = RoundControl(tmp_path, 2, 1)
    monkeypatch.setenv("SLURM_ELASTIC_CONTROL", control.environment(0)["SLURM_ELASTIC_CONTROL"])
    monkeypatch.setattr(trainer, "_looked", False)
    monkeypatch.setattr(trainer, "_control", None)
    yield control
    # A worker's first question changes what signals do to it.
    unshield()


def test_a_stop_has_a_reason_that_is_a_string(control: RoundControl) -> None:
    assert trainer.should_stop() is None
    control.hold()
    control.stop_at(2, "time_limit")
    stop = trainer.should_stop()
    assert stop is not None
    assert stop.reason is trainer.StopReason.TIME_LIMIT
    assert stop.reason == "time_limit"
    assert (f"{stop.reason}", str(stop.reason), json.dumps(stop.reason)) == ("time_limit", "time_limit", '"time_limit"')
    assert trainer.StopReason("of a later release") is trainer.StopReason.NODE_LEFT


def test_every_reason_of_the_membership_is_known() -> None:
    known = {reason.value for reason in trainer.StopReason}
    assert known >= {reason.value for reason in LeaveReason} - {"finished", "failed"}
    assert known >= {Reason.NODE_JOINED.value, Reason.NODE_LEFT.value}


def test_the_first_step_is_awaited_from_a_script_that_may_forget_it(
    control: RoundControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_awaited() -> bool:
        return control.progress()[0].seconds_awaited is not None

    assert trainer.is_managed()
    assert is_awaited()
    monkeypatch.setattr(elastic_state, "_claimed", "")
    elastic_state.claim("ElasticCallback")
    assert not is_awaited()
    monkeypatch.setattr(elastic_state, "_claimed", "")
    state = ElasticState()
    assert is_awaited()
    next(state.batches([0]))
    assert not is_awaited()
    trainer._await_first(by_script=True)
    trainer.should_stop(1)
    assert not is_awaited()


def test_the_time_that_input_takes_is_loading(control: RoundControl) -> None:
    trainer.should_stop(1)
    assert list(trainer.loading(range(3))) == [0, 1, 2]
    next(trainer.loading(iter(partial(time.sleep, 0.02), "never")))
    use = control.progress()[0].since_first
    assert use is not None
    assert use.loading >= 0.02


def test_outside_of_a_run() -> None:
    assert trainer.should_stop() is None
    assert trainer.should_stop(3) is None
    trainer.report_checkpoint(3)
    trainer.report(3, loss=0.5)
    assert trainer.can_publish_checkpoint()
    info = trainer.start_info()
    assert (info.reason, info.round, info.resumes) == ("start", 0, False)
    assert (info.run_id, info.run_dir, info.node) == ("", "", "")


def test_mistakes_are_found_outside_of_a_run_too() -> None:
    for take in (trainer.should_stop, trainer.report_checkpoint, lambda step: trainer.report(step, loss=0.5)):
        with pytest.raises(TypeError):
            take("3")  # type: ignore[arg-type, no-untyped-call]
    with pytest.raises(TypeError, match="loss is a str"):
        trainer.report(1, loss="0.5")  # type: ignore[arg-type]


def test_inside_of_a_run(control: RoundControl) -> None:
    assert trainer.should_stop(100) is None
    trainer.report_checkpoint(100)
    trainer.report(100, loss=0.5)
    (progress,) = control.progress()
    assert (progress.step, progress.checkpoint, progress.loss_step, progress.loss) == (100, 100, 100, 0.5)
    control.hold()
    control.stop_at(2, "preempted", 30)
    stop = trainer.should_stop(101)
    assert stop is not None
    assert stop.reason == "preempted"
    assert trainer.should_stop(101) is stop
    assert trainer.can_publish_checkpoint()
    control.fence()
    assert not trainer.can_publish_checkpoint()


def test_a_fence_that_comes_while_the_run_directory_is_asked_counts(
    control: RoundControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(environ: object) -> bool:
        control.fence()
        return False

    monkeypatch.setattr(trainer, "is_superseded", slow)
    assert not trainer.can_publish_checkpoint()


def test_forked_process_is_no_worker(control: RoundControl) -> None:
    trainer.should_stop(100)
    control.hold()
    control.stop_at(2, "preempted")
    child = os.fork()
    if child == 0:
        os._exit(0 if [trainer.should_stop(999) for _ in range(5)] == [None] * 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (control.progress()[0].boundary, control.progress()[0].step) == (1, 100)
    assert trainer.should_stop(101) is not None


@pytest.mark.parametrize(
    ("reason", "number", "resumes"), [("start", "0", False), ("requeued", "0", True), ("node_lost", "3", True)]
)
def test_start_info(reason: str, number: str, resumes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"REASON": reason, "ROUND": number, "RUN_ID": "7", "RUN_DIR": "/runs/7", "NODE": "n2"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_ELASTIC_{name}", value)
    info = trainer.start_info()
    assert (info.reason, info.round, info.resumes) == (reason, int(number), resumes)
    assert (info.run_id, info.run_dir, info.node) == ("7", "/runs/7", "n2")


def test_block_that_must_not_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    with trainer.expires(after=1):
        pass
    pipe = tmp_path / "timer"
    os.mkfifo(pipe)
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(pipe))
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with trainer.expires(after=60, scope="step"):
        begun = json.loads(os.read(reader, 4096))
    ended = json.loads(os.read(reader, 4096))
    os.close(reader)
    assert [(line["pid"], line["scope_id"]) for line in (begun, ended)] == [(os.getpid(), "step")] * 2
    assert (begun["signal"], ended["expiration_time"]) == (9, -1)


def test_import_takes_the_standard_library_only(tmp_path: Path) -> None:
    control = RoundControl(tmp_path, 0, 1)
    script = (
        "import sys; from slurm_elastic import trainer; trainer.can_publish_checkpoint(); trainer.should_stop(1)\n"
        "names = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names\n"
        "print(sorted(names - {'slurm_elastic', '__main__'}))"
    )
    environment = {"PYTHONPATH": str(ROOT), **control.environment(0)}
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert control.progress()[0].boundary == 1
