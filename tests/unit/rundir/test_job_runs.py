from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic import rundir
from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import SlurmJob

A, B, C = ("t.py", "a"), ("t.py", "b"), ("eval.py",)


def job(step: int | None = 0, restarts: int = 0, *, nodes: int = 1, element: int | None = None) -> SlurmJob:
    names = ",".join(f"n{number + 1}" for number in range(nodes))
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": names, "SLURM_NODEID": "0"}
    environ["SLURM_RESTART_COUNT"] = str(restarts)
    if step is not None:
        environ.update(SLURM_STEP_ID=str(step), SLURM_STEP_NODELIST=names)
    if element is not None:
        environ.update(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID=str(element))
    found = SlurmJob.from_environment(environ)
    assert found is not None
    return found


def begun(run_id: str, step: str, command: tuple[str, ...], **more: Any) -> rundir.KnownRun:
    return rundir.KnownRun(run_id, rundir.RunStart(step, command), **more)


def earlier(run_id: str, step: str, command: tuple[str, ...], **more: Any) -> rundir.KnownRun:
    return rundir.KnownRun(run_id, None, rundir.RunStart(step, command), **more)


@pytest.mark.parametrize(
    ("of", "command", "runs", "expected"),
    [
        # A new run has the number of its step.
        (job(), A, [], "7"),
        (job(3), A, [begun("7", "0", A)], "7.3"),
        (job(0, element=2), A, [], "5_2"),
        (job(1, element=2), A, [], "5_2.1"),
        (job(None), A, [], "7"),
        # An agent of the same step has begun it.
        (job(1), A, [begun("7", "0", A), begun("7.1", "1", A)], "7.1"),
        (job(nodes=2), B, [begun("7", "0", A)], "7"),
        # Several programs in one step on one node, one after the other or beside each other.
        (job(), B, [begun("7", "0", A)], "7.1"),
        (job(None), B, [begun("7", "", A)], "7.1"),
        (job(), A, [begun("7", "0", A)], "7"),
        (job(), A, [begun("7", "0", A, over_here=True)], "7.1"),
        (job(nodes=2), B, [begun("7", "0", A, over_here=True)], "7.1"),
        (job(1), B, [begun("7", "0", A), begun("7.1", "0", B)], "7.2"),
        # Another step is about to begin a run.
        (job(2), A, [rundir.KnownRun("7", None), rundir.KnownRun("7.1", None)], "7.2"),
        # After a requeue: the same script and arguments, whatever the number of the step.
        (job(0, 1), B, [earlier("7", "0", A), earlier("7.1", "1", B)], "7.1"),
        (job(1, 1), A, [earlier("7", "0", A), begun("7.1", "0", B)], "7"),
        (job(1, 1), A, [earlier("7", "0", A), earlier("7.1", "1", A)], "7.1"),
        (job(1, 1), A, [earlier("7", "0", A), begun("7.1", "0", A)], "7"),
        (job(0, 1), A, [earlier("7", "0", A, finished=True)], "7"),
        # A program that has not run yet.
        (job(0, 1), C, [earlier("7", "0", A)], "7.1"),
        (job(1, 1), B, [earlier("7", "0", A), begun("7.1", "0", C)], "7.2"),
        # Other arguments after a requeue: the only run goes on, but what is finished is not taken for it.
        (job(0, 1), B, [earlier("7", "0", A)], "7"),
        (job(0, 1), B, [earlier("7", "0", A, finished=True)], "7.1"),
        (job(0, 1), ("t.py", "c"), [earlier("7", "0", A), earlier("7.1", "1", B)], "7.2"),
        # Whether another step has made the directory of its new run already, or has begun it, makes no difference.
        (job(0, 1), C, [earlier("7", "0", A), rundir.KnownRun("7.1", None)], "7.1"),
        (job(0, 1), B, [earlier("7", "0", A), begun("7.1", "1", C)], "7"),
        # An earlier release has written no starts.
        (job(0, 1), A, [rundir.KnownRun("7", None)], "7"),
    ],
)
def test_which_run_a_step_is(
    of: SlurmJob, command: tuple[str, ...], runs: list[rundir.KnownRun], expected: str
) -> None:
    assert rundir.choose_run(of, command, runs) == expected


def test_each_srun_is_one_run_and_finds_itself_after_a_requeue(tmp_path: Path) -> None:
    assert rundir.join_own(tmp_path, job(0), A).run_id == "7"
    assert rundir.join_own(tmp_path, job(1), B).run_id == "7.1"
    assert rundir.join_own(tmp_path, job(1), B).run_id == "7.1"
    assert rundir.join_own(tmp_path, job(10), A).run_id == "7.10"
    assert [rundir.join_own(tmp_path, job(step, 1), which).run_id for step, which in enumerate((B, A, C, A))] == [
        "7.1",
        "7",
        "7.2",
        "7.10",
    ]
    assert [each.run_id for each in rundir.runs_of_job(tmp_path, "7")] == ["7", "7.1", "7.2", "7.10"]
    assert rundir.run_start(rundir.RunDir.for_run(tmp_path, "7.1")) == rundir.RunStart("0", B)
    assert rundir.runs_of_job(tmp_path, "8") == []


@pytest.mark.parametrize(
    ("code", "failed", "expected"), [(0, False, "7.1"), (1, True, "7.1"), (1, False, "7"), (75, False, "7")]
)
def test_an_agent_after_the_end_of_a_run_in_the_same_step(
    tmp_path: Path, code: int, failed: bool, expected: str
) -> None:
    run_dir = rundir.join_own(tmp_path, job(nodes=2), A)
    ended = {"event": "agent_ended", "agent": "n1/7.0/55", "exit_code": code}
    run_dir.append_progress("n1", "7", json.dumps(ended))
    if failed:
        run_dir.publish_record({}, "failures", rundir.incarnation("7", 0))
    assert rundir.join_own(tmp_path, job(nodes=2), A).run_id == expected
    # On another node the agent of this run may not have begun.
    run_dir.append_progress("n1", "7", json.dumps({**ended, "agent": "n2/7.0/55"}))
    assert rundir.join_own(tmp_path, job(nodes=2), A).run_id == "7"


def test_another_command_is_refused(tmp_path: Path) -> None:
    rundir.join_own(tmp_path, job(nodes=2), ("t.py", "a b"))
    with pytest.raises(
        UsageError, match=r"""run 7 is "t.py 'a b'", and this agent has 't.py b': .* another --run-id$"""
    ):
        rundir.join_own(tmp_path, job(nodes=2), B)
    named = rundir.RunDir.for_run(tmp_path, "mine").open()
    rundir.join_named(named, A, again=False)
    rundir.join_named(named, A, again=False)
    with pytest.raises(UsageError, match=r"run mine is 't\.py a', and this agent has 't\.py b'"):
        rundir.join_named(named, B, again=False)
    # Slurm has started the job again, and its script may give other arguments now.
    rundir.join_named(named, B, again=True)


def test_a_start_of_another_user_does_not_count(tmp_path: Path) -> None:
    run_dir = rundir.RunDir.for_run(tmp_path, "7").open()
    (run_dir.path / "starts").mkdir()
    (run_dir.path / "starts/000000.json").write_text('{"step": "5", "command": ["x"]}')
    run_dir.secret()
    assert rundir.join_own(tmp_path, job(0), A).run_id == "7"
    assert rundir.run_start(run_dir) == rundir.RunStart("0", A)


def test_a_requeued_job_joins_the_start_of_its_run_that_agents_of_another_job_have_joined(tmp_path: Path) -> None:
    run_dir = rundir.join_own(tmp_path, job(0), A)
    assert rundir.join_own(tmp_path, job(0, 1), A) == run_dir
    assert rundir.incarnation_of(run_dir, 1) == "7.1"
    for _ in range(2):
        rundir.join_named(run_dir, A, again=False)
        assert rundir.incarnation_of(run_dir, None) == "7.1"
    # Also with other arguments, and where another step begins it.
    for restarts, step, command in ((2, 1, A), (3, 0, ("t.py", "--resume"))):
        assert rundir.join_own(tmp_path, job(step, restarts), command) == run_dir
        assert rundir.incarnation_of(run_dir, restarts) == "7.1"
    rundir.join_named(run_dir, A, again=True)
    assert (rundir.incarnation_of(run_dir, None), rundir.incarnation_of(run_dir, 0)) == ("7.1", "7.0")


def test_a_start_that_an_agent_has_begun_is_not_taken_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = rundir.join_own(tmp_path, job(0), A)
    numbers = rundir.RunDir.numbers

    def begins_meanwhile(self: rundir.RunDir, kind: str) -> list[int]:
        found = numbers(self, kind)
        if found == [0]:
            monkeypatch.setattr(rundir.RunDir, "numbers", numbers)
            rundir.join_own(tmp_path, job(0, 1), A)
        return found

    assert rundir.run_start(run_dir) is not None
    monkeypatch.setattr(rundir.RunDir, "numbers", begins_meanwhile)
    rundir.join_named(run_dir, A, again=True)
    assert (rundir.incarnation_of(run_dir, 1), rundir.incarnation_of(run_dir, None)) == ("7.1", "7.1")


def test_a_run_of_several_jobs_has_one_incarnation(tmp_path: Path) -> None:
    run_dir = rundir.RunDir.for_run(tmp_path, "mine").open()
    rundir.join_named(run_dir, A, again=False)
    rundir.join_named(run_dir, A, again=True)
    assert (run_dir.numbers("starts"), rundir.incarnation_of(run_dir, None)) == ([0], "mine.0")
