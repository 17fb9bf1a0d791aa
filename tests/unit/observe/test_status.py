from __future__ import annotations

import json
import math

from slurm_elastic.observe.status import run_status, status_json
from slurm_elastic.observe.views import LiveAgent, LiveLeave, LiveRun, LiveWorker, RunState, RunStatus
from slurm_elastic.rendezvous.transport.messages import StatusAnswer
from slurm_elastic.rundir import JobRecords
from slurm_elastic.slurm import QueuedJob
from tests.unit.observe.runs import START, WrittenRun, iso

A, B, C = "n1/7.0/100", "n2/7.0/200", "n10/7.0/300"


def queued(state: str = "RUNNING", reason: str | None = None, start: int | None = None) -> QueuedJob:
    return QueuedJob("7", "7", state, 1, "", "7", reason, start, "/home/me")


def trains(run: WrittenRun) -> None:
    for agent in (A, B, C):
        run.started(0, agent)
    run.round(1, 0, [A, B, C])
    sample = {"round": 0, "first_step": 1, "first": 1.0}
    run.progress(11, A, "progress", **sample, steps=50, step=50, checkpoint=40, last=6.0)
    run.progress(21, A, "progress", **sample, steps=150, step=150, checkpoint=140, loss=0.25, loss_step=149, last=16.0)


def status(run: WrittenRun, at: float = 30, *jobs: QueuedJob, live: bool | None = None) -> RunStatus:
    return run_status(run.records(), START + at, jobs or None, live)


def test_a_run_that_trains(run: WrittenRun) -> None:
    trains(run)
    seen = status(run, 30, queued(), live=True)
    assert (seen.state, seen.round, seen.nodes, seen.world_size) == (RunState.RUNNING, 0, 3, 6)
    assert (seen.step, seen.checkpoint, seen.steps_per_second) == (150, 140, 10.0)
    assert (seen.loss, seen.loss_step) == (0.25, 149)
    assert (seen.restarts, seen.restarts_left) == (0, 3)
    # In Slurm's order of nodes.
    assert [(agent.node, agent.rank) for agent in seen.agents] == [("n1", 0), ("n2", 2), ("n10", 4)]
    assert {agent.state for agent in seen.agents} == {"training"}


def test_a_lost_node_is_lost_until_it_comes_back(run: WrittenRun) -> None:
    trains(run)
    run.event(22, "n1", "node_lost", "lost n2", nodes=["n2"], why="its connection broke", silent_for=0.3)
    run.round(23, 1, [A, C], "node_lost")
    seen = status(run)
    assert [agent.state for agent in seen.agents] == ["training", "lost", "training"]
    assert (seen.state, seen.round, seen.reason, seen.nodes) == (RunState.RUNNING, 1, "node_lost", 2)
    again = "n2/7.0/999"
    run.started(25, again)
    run.round(26, 2, [A, again, C], "node_joined")
    assert {agent.state for agent in status(run).agents} == {"training"}


def test_a_requeued_job_waits_with_its_reason_and_its_start(run: WrittenRun) -> None:
    trains(run)
    run.ended(25, 0, [A, B, C], 1.1)
    for agent in (A, B, C):
        run.progress(26, agent, "agent_ended", exit_code=75)
    seen = status(run, 30, queued("PENDING", "BeginTime", 1_764_000_120), live=False)
    assert seen.state is RunState.WAITING
    assert seen.jobs is not None
    assert [(job.job, job.reason, job.start) for job in seen.jobs] == [("7", "BeginTime", 1_764_000_120)]
    assert {(agent.state, agent.exit_code) for agent in seen.agents} == {("ended", 75)}


def test_killed_agents_are_not_taken_for_running(run: WrittenRun) -> None:
    trains(run)
    assert run_status(run.records(), START + 30, (), False).state is RunState.STOPPED
    assert {agent.state for agent in run_status(run.records(), START + 30, (), False).agents} == {"ended"}
    # Slurm does not answer; nothing listens where the leader was.
    assert status(run, live=False).state is RunState.STOPPED
    # Slurm runs the job: the leader is being replaced, or cannot be reached from here.
    seen = status(run, 30, queued(), live=False)
    assert seen.state is RunState.RUNNING
    assert "the leader does not answer" in seen.problems[0]


def test_a_failed_run_has_its_root_cause(run: WrittenRun) -> None:
    trains(run)
    failure = {"agent": B, "node": "n2", "rank": 3, "exit_code": 1, "message": "ValueError: no", "log": "/stderr.log"}
    run.run_dir.publish_record(failure, "failures", "7.0")
    run.event(22, "n1", "run_ended", "the run failed", outcome="failed", nodes=["n2"], rank=3, detail="")
    seen = status(run, live=False)
    assert seen.state is RunState.FAILED
    assert seen.root_cause is not None
    assert (seen.root_cause.node, seen.root_cause.rank, seen.root_cause.text) == ("n2", 3, "ValueError: no")
    # It was submitted again.
    again = "n1/7.1/500"
    run.started(40, again)
    assert status(run, 41, queued()).state is RunState.WAITING
    run.round(42, 1, [again], "requeued")
    assert status(run, 43, queued()).state is RunState.RUNNING


def test_a_run_that_was_given_up_has_failed(run: WrittenRun) -> None:
    run.started(0, A)
    run.event(600, "n1", "run_ended", "the run was given up", outcome="timed_out", detail="")
    run.progress(601, A, "agent_ended", exit_code=1)
    assert status(run, 700).state is RunState.FAILED


def test_a_failure_that_was_restarted_is_the_last_failure(run: WrittenRun) -> None:
    trains(run)
    detail = "rank 1 on n1: ValueError: once"
    run.event(22, "n1", "round_ended", "round 0 ends", round=0, reason="worker_failed", nodes=["n1"], detail=detail)
    run.round(23, 1, [A, B, C], "worker_failed", restarts=1)
    seen = status(run)
    assert (seen.state, seen.restarts, seen.restarts_left) == (RunState.RUNNING, 1, 2)
    assert seen.root_cause is not None
    assert seen.root_cause.text == detail


def test_a_run_that_is_over_says_why_its_job_holds_its_nodes(run: WrittenRun) -> None:
    trains(run)
    run.progress(31, A, "agent_ended", exit_code=0)
    run.run_dir.mark_done({"outcome": "succeeded"})
    assert status(run, 40).holds == ""
    seen = status(run, 40, queued())
    assert seen.state is RunState.FINISHED
    assert seen.holds == "job 7 still holds its nodes: agents on n[2,10] have not ended"
    for agent in (B, C):
        run.progress(32, agent, "agent_ended", exit_code=0)
    why = "its agents have ended, its batch script has not"
    assert status(run, 40, queued()).holds == f"job 7 still holds its nodes: {why}"
    why = "Slurm is ending its processes"
    assert status(run, 40, queued("COMPLETING")).holds == f"job 7 still holds its nodes: {why}"


def test_notices_count_down(run: WrittenRun) -> None:
    trains(run)
    notice = {"text": "preempted, 15 s left", "seconds": 15.0, "time": iso(25)}
    for job in ("7", "6"):
        JobRecords(run.run_dir, job).publish_notice(0, notice)
    (seen,) = status(run, 30).notices
    assert (seen.job, seen.seconds) == ("7", 10.0)
    assert status(run, 300).notices[0].seconds == 0.0


def test_what_agents_answer_goes_before_their_records(run: WrittenRun) -> None:
    trains(run)
    newcomer = "n4/8.0/1"
    worker = LiveWorker(0, step=160, checkpoint=150, loss="inf", loss_step=159)
    answer = LiveRun(
        StatusAnswer(A, 1, "running", 1.0, asked=4, answered=3, silent="n10"),
        agents={
            A: LiveAgent("training", seconds=9.0, round=0, workers=(worker,)),
            B: LiveAgent("leaving", round=0, leave=LiveLeave("preempted", "preempted by job 9", 12.5)),
            newcomer: LiveAgent("starting"),
        },
        problems=("a report cannot be read",),
    )
    seen = run_status(run.records(), START + 30, [queued()], True, answer)
    assert [(agent.node, agent.state, agent.live is not None) for agent in seen.agents] == [
        ("n1", "training", True),
        ("n2", "leaving", True),
        ("n4", "starting", True),
        ("n10", "training", False),
    ]
    assert (seen.step, seen.checkpoint, seen.agents[0].since) == (160, 150, START + 21)
    assert (seen.loss, seen.loss_step) == (math.inf, 159)
    (notice,) = seen.notices
    assert (notice.node, notice.job, notice.text, notice.seconds) == ("n2", "7", "preempted by job 9", 12.5)
    assert seen.problems == ("a report cannot be read",)
    told = json.loads(json.dumps(status_json(seen)))
    assert (told["live"]["asked"], told["live"]["silent"]) == (4, "n10")
    assert told["agents"][0]["live"]["workers"][0]["step"] == 160
    assert told["agents"][3]["live"] is None


def test_a_notice_on_record_gives_way_to_what_its_agent_says(run: WrittenRun) -> None:
    trains(run)
    JobRecords(run.run_dir, "7").publish_notice(0, {"text": "preempted", "seconds": 60.0, "time": iso(29)})
    leave = LiveLeave("preempted", "preempted by job 9", 12.5)
    answer = LiveRun(StatusAnswer(A, 1, "running", 1.0, 3, 3), agents={B: LiveAgent("training", leave=leave)})
    assert [each.text for each in status(run, 30, queued()).notices] == ["preempted"]
    (notice,) = run_status(run.records(), START + 30, [queued()], True, answer).notices
    assert (notice.node, notice.seconds) == ("n2", 12.5)


def test_loops_are_shown_while_the_run_goes_on(run: WrittenRun) -> None:
    trains(run)
    for number in range(1, 5):
        run.event(100 * number, "n1", "node_lost", nodes=["n2"])
        run.round(100 * number + 1, number, [A, B, C])
    (loop,) = status(run, 600, queued(), live=True).loops
    assert (loop.loop, loop.nodes) == ("node_flapping", ("n2",))
    assert status_json(status(run, 600, queued(), live=True))["loops"][0]["text"] == loop.text
    run.run_dir.mark_done({})
    assert status(run, 600).loops == ()
