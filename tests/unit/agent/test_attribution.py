"""The feature that says what the failure of a worker is."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_elastic.agent import features
from slurm_elastic.agent.features import AttributionFeature, RunningRound
from slurm_elastic.agent.root_cause import last_output, memory_kills
from slurm_elastic.agent.watchdog.stacks import resident
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from tests.unit.agent.helpers.rounds import placed

PLACED = placed("n1", rank=2, workers=2, nodes=3, round_=0)


def failure(exit_code: int, message: str = "", error_file: str = "", *, hung: bool = False) -> WorkerFailure:
    return WorkerFailure("n1/7.0/1", "n1", 5, exit_code, message, error_file, hung=hung)


def running(pids: dict[int, int]) -> RunningRound:
    return RunningRound(PLACED, pids, {}, tuple)


def test_the_cause_is_found_in_the_whole_traceback(tmp_path: Path) -> None:
    stack = "".join(f"\nframe #{number}: c10::Error" for number in range(60))
    words = f'Traceback (most recent call last):\n  File "t.py", line 1\nRuntimeError: CUDA out of memory.{stack}'
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": {"message": "", "extraInfo": {"py_callstack": words}}}))
    found = AttributionFeature().attribute(running({}), failure(1, "frame #59: c10::Error", str(error_file)), 1)
    assert (found.cause, found.domain, found.outlook) == ("gpu_memory", "user_code", "not_again")


@pytest.mark.parametrize(
    ("before", "after", "cause"), [(3, 4, "host_memory"), (3, 3, "killed"), (None, 4, "killed"), (3, None, "killed")]
)
def test_a_worker_that_the_kernel_killed_for_lack_of_memory(
    before: int | None, after: int | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([before, after])
    monkeypatch.setattr(features, "memory_kills", lambda: next(kills))
    feature = AttributionFeature()
    workers = running({0: os.getpid(), 1: 2**22 + 1})
    feature.workers_started(workers)
    found = feature.attribute(workers, failure(-9, "epoch 3"), 1)
    assert found.cause == cause
    if cause == "host_memory":
        first, last = found.message.split("\n")
        assert first.startswith("by the kernel: out of memory on n1; rank 4 has ")
        assert "rank 5" not in first, "it is gone"
        assert last == "epoch 3"
        assert found.detail == first.removeprefix("by the kernel: ")


@pytest.mark.parametrize("recorded", [True, False])
def test_an_exception_is_the_cause_also_where_the_exit_after_it_is_aborted(tmp_path: Path, recorded: bool) -> None:
    traceback = 'Traceback (most recent call last):\n  File "t.py", line 1\nValueError: bad sample 7\n'
    log, error_file = tmp_path / "stderr.log", tmp_path / "error.json"
    log.write_text(f"{traceback}terminate called without an active exception\n")
    if recorded:
        error_file.write_text(json.dumps({"message": {"message": "", "extraInfo": {"py_callstack": traceback}}}))
    feature = AttributionFeature()
    workers = replace(running({0: 1}), progress=lambda: (WorkerProgress(0, True, 3, 3, None, 0.0, False),))
    found = []
    for exit_code in (1, -6):
        message = last_output(str(error_file), str(log))
        assert message.endswith("ValueError: bad sample 7")
        found.append(feature.attribute(workers, replace(failure(exit_code, message, str(error_file)), log=str(log)), 1))
    assert [each.cause for each in found] == ["exception", "exception"]
    assert found[0].fingerprint == found[1].fingerprint != ""
    # Of an end whose last word is no exception that word tells, or the signal.
    log.write_text("terminate called without an active exception\n")
    error_file.unlink(missing_ok=True)
    assert last_output("", str(log)) == "terminate called without an active exception"
    assert feature.attribute(workers, replace(failure(-6), log=str(log)), 1).cause == "left_thread"
    log.write_text("free(): invalid pointer\n")
    assert feature.attribute(workers, replace(failure(-6), log=str(log)), 1).cause == "native_crash"


def test_a_worker_that_the_watchdog_killed_was_not_killed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([3, 4])
    monkeypatch.setattr(features, "memory_kills", lambda: next(kills))
    feature = AttributionFeature()
    feature.workers_started(running({}))
    assert feature.attribute(running({}), failure(-9, "by the watchdog: no step for 3 s", hung=True), 1).cause == "hang"


@pytest.mark.parametrize(
    ("cgroup", "file", "content", "expected"),
    [
        ("0::/job_7/step_0\n", "sys/fs/cgroup/job_7/step_0/memory.events", "low 0\noom 5\noom_kill 2\n", 2),
        ("4:memory,x:/uid_1/job_7\n0::/\n", "sys/fs/cgroup/memory/uid_1/job_7/memory.oom_control", "oom_kill 1\n", 1),
        ("0::/\n", "proc/vmstat", "pgfault 7\noom_kill 9\n", 9),
        ("0::/\n", "proc/vmstat", "oom_kill many\n", None),
        (None, "proc/vmstat", "oom_kill 0\n", 0),
        ("damaged", "nothing", "", None),
    ],
)
def test_the_kernel_counts(tmp_path: Path, cgroup: str | None, file: str, content: str, expected: int | None) -> None:
    if cgroup is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert memory_kills(tmp_path) == expected


def test_the_fault_of_a_node_is_not_charged_in_two_rounds() -> None:
    feature = AttributionFeature()
    text = "OSError: [Errno 28] No space left on device: '/tmp/x'"
    charged = []
    for round_ in range(3):
        workers = replace(running({}), assignment=replace(PLACED, round=round_))
        # All workers of the node fail, and that is one fault.
        found = [feature.attribute(workers, failure(1, text), pid) for pid in (1, 2, 3)]
        charged.append([not each.uncharged for each in found])
        assert found[0].detail.startswith("not charged to the script, ") is (round_ < 2)
    assert charged == [[False] * 3, [False] * 3, [True] * 3]
    assert not feature.attribute(workers, failure(1, "NameError: x"), 1).uncharged


def test_memory_of_a_process() -> None:
    assert resident(os.getpid()) > 1 << 20
    assert resident(2**22 + 1) == 0
