from __future__ import annotations

import json

from slurm_elastic.observe.failures import read_failures, round_failures
from slurm_elastic.observe.views import Failure
from slurm_elastic.rundir import RunContents
from tests.unit.observe.runs import WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"


def restarted(run: WrittenRun, at: float, number: int, node: str, detail: str) -> None:
    fields = {"round": number, "reason": "worker_failed", "nodes": [node], "detail": detail}
    run.event(at, "n1", "round_ended", f"round {number} ends: worker failed, {node} ({detail})", **fields)


def failed(run: WrittenRun) -> None:
    text = "Traceback\nValueError: at 9"
    failure = {"agent": B, "node": "n2", "rank": 3, "exit_code": 1, "message": text, "log": "/l"}
    run.run_dir.publish_record(failure, "failures", "7.0")
    run.event(9, "n1", "run_ended", "the run failed", outcome="failed", nodes=["n2"], rank=3)


def test_the_root_cause_comes_first_and_what_followed_is_grouped(run: WrittenRun) -> None:
    run.round(1, 0, [A, B])
    failed(run)
    closed = "RuntimeError: Connection closed by peer [10.0.0.{}]:4711"
    errors = [Failure("n1", rank, closed.format(rank)) for rank in (0, 1)]
    errors += [Failure("n2", 2, "KeyboardInterrupt"), Failure("n2", 3, "ValueError: at 9", "/mine")]
    (failure,) = round_failures(run.records(), {0: errors})
    assert (failure.final, failure.reason, failure.root.node, failure.root.rank) == (True, "the run failed", "n2", 3)
    assert failure.root.text == "Traceback\nValueError: at 9"
    assert failure.root.log == "/mine"
    assert failure.followed == {closed.format(0): [0, 1], "KeyboardInterrupt": [2]}


def test_a_failure_that_comes_again_is_one_with_its_rounds(run: WrittenRun) -> None:
    for number in range(3):
        run.round(number + 1, number, [A, B], restarts=number)
    restarted(run, 2, 0, "n2", "rank 3: ValueError: at 7")
    restarted(run, 3, 1, "n2", "rank 3: ValueError: at 8")
    failed(run)
    (failure,) = round_failures(run.records(), {})
    assert (failure.rounds, failure.final) == ((0, 1, 2), True)


def test_the_failure_that_ended_the_run_comes_before_earlier_ones(run: WrittenRun) -> None:
    run.round(1, 0, [A, B])
    run.round(2, 1, [A, B], restarts=1)
    restarted(run, 2, 0, "n1", "rank 1: OSError: gone")
    failed(run)
    last, first = round_failures(run.records(), {0: [Failure("n1", 1, "Traceback\nOSError: gone", "/1")]})
    assert (last.rounds, last.final, first.rounds, first.final) == ((1,), True, (0,), False)
    assert (first.root.node, first.root.rank, first.followed) == ("n1", 1, {})
    assert first.root.text == "Traceback\nOSError: gone"


def test_an_earlier_round_of_an_agent_that_fails_for_good_is_no_failure(run: WrittenRun) -> None:
    run.round(1, 0, [A, B])
    run.round(3, 1, [A, B, "n3/7.0/300"])
    failed(run)
    assert [failure.rounds for failure in round_failures(run.records(), {})] == [(1,)]


def test_errors_in_a_round_that_a_lost_node_ended_follow_from_that(run: WrittenRun) -> None:
    run.round(1, 0, [A, B])
    text = "round 0 ends: node lost, n2"
    run.event(2, "n1", "round_ended", text, round=0, reason="node_lost", nodes=["n2"], detail="")
    (failure,) = round_failures(run.records(), {0: [Failure("n1", 0, "RuntimeError: closed")]})
    assert (failure.reason, failure.root.rank, failure.root.text) == (text, None, "")
    assert failure.followed == {"RuntimeError: closed": [0]}


def test_errors_are_read_from_error_files_and_from_tracebacks_in_logs(run: WrittenRun) -> None:
    run.round(1, 0, [A, B])
    restarted(run, 2, 0, "n1", "rank 0: ValueError: no")
    recorded = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback\nValueError: no"}}}
    for rank, name, content in (
        (0, "error.json", json.dumps(recorded)),
        (1, "stderr.log", "noise\nTraceback (most recent call last):\n  File\nRuntimeError: closed\n"),
        (2, "stderr.log", "just a warning\n"),
        (3, "error.json", '{"cut sho'),
    ):
        directory = run.run_dir.rank_dir(0, f"n{rank // 2 + 1}", rank, 4)
        directory.mkdir(parents=True)
        (directory / name).write_text(content)
    (failure,) = read_failures(RunContents(run.run_dir), run.records())
    assert (failure.root.rank, failure.root.text) == (0, "Traceback\nValueError: no")
    assert failure.followed == {"RuntimeError: closed": [1], "": [3]}


def test_the_root_is_told_from_its_consequences(run: WrittenRun) -> None:
    """As when the leader had heard of a consequence alone, or a release before this one has written the records."""
    run.round(1, 0, [A, B])
    restarted(run, 2, 0, "n1", "rank 0: RuntimeError: Connection closed by peer [10.0.0.1]:4711")
    errors = [Failure("n1", rank, "RuntimeError: Connection closed by peer [10.0.0.1]:1") for rank in (0, 1)]
    root = Failure("n2", 3, "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'", "/3")
    (failure,) = round_failures(run.records(), {0: [*errors, root]})
    assert (failure.root.node, failure.root.rank, failure.root.text, failure.root.log) == ("n2", 3, root.text, "/3")
    assert failure.root.cause == "import"
    assert [*failure.followed.values()] == [[0, 1]]


def test_what_agents_have_written_down_counts(run: WrittenRun) -> None:
    run.round(1, 0, [A, B])
    text = "round 0 ends"
    fields = {"reason": "worker_failed", "nodes": ["n2"], "detail": "rank 3: exit code -9", "cause": "host_memory"}
    run.event(2, "n1", "round_ended", text, round=0, **fields)
    (failure,) = round_failures(run.records(), {})
    assert (failure.root.cause, failure.root.rank) == ("host_memory", 3)
