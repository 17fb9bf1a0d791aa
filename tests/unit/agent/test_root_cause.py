from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_elastic.agent.root_cause import last_output, root_cause, told_elsewhere
from slurm_elastic.rendezvous.membership.agents import Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.events import Ended, Interrupted, Outcome

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\nValueError: nan\n'


def failure(exit_code: int, message: str = "", log: str = "/r/rank_05/stderr.log") -> WorkerFailure:
    return WorkerFailure("n2/7.0/1", "n2", 5, exit_code, message=message, error_file="/r/rank_05/error.json", log=log)


def test_names_who_how_why_and_where() -> None:
    assert root_cause(failure(1, TRACEBACK)) == (
        "rank 5 on n2 ended with exit code 1\n"
        "  Traceback (most recent call last):\n"
        '    File "train.py", line 3, in <module>\n'
        "      step()\n"
        "  ValueError: nan\n"
        "the rest: /r/rank_05/stderr.log"
    )


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (3, "rank 5 on n2 ended with exit code 3"),
        (-11, "rank 5 on n2 was killed by SIGSEGV"),
        (-9, "rank 5 on n2 was killed by SIGKILL, perhaps for lack of memory"),
        (-99, "rank 5 on n2 was killed by signal 99"),
    ],
)
def test_how_it_ended(exit_code: int, expected: str) -> None:
    assert root_cause(failure(exit_code)).splitlines() == [expected, "the rest: /r/rank_05/stderr.log"]


def test_says_where_as_far_as_it_is_known() -> None:
    assert root_cause(failure(1, log="")).splitlines()[-1] == "the rest: /r/rank_05/error.json"
    bare = WorkerFailure("a", "n2", 5, 1)
    assert root_cause(bare) == "rank 5 on n2 ended with exit code 1"


def test_a_long_traceback_keeps_its_head_and_its_end() -> None:
    frames = "".join(f"  frame {number}\n" for number in range(100))
    lines = root_cause(failure(1, f"Traceback (most recent call last):\n{frames}ValueError: nan")).splitlines()
    assert lines[1:4] == ["  Traceback (most recent call last):", "  ...", "    frame 83"]
    assert lines[-2] == "  ValueError: nan"
    assert len(lines) == 22


def test_a_long_traceback_keeps_the_frames_of_the_script_and_the_last_of_a_library() -> None:
    module = (
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line {}, in call\n    call()\n    ^^\n'
    )
    script = '  File "/home/me/train.py", line {}, in step\n    model(batch)\n'
    deep = "".join(module.format(number) for number in range(9))
    head = f"Traceback (most recent call last):\n{module.format(99)}"
    text = f"{head}{script.format(5)}{deep}{script.format(6)}{deep}ValueError: nan"
    told = last_lines(text)
    between = [script.format(5), script.format(6), module.format(8)]
    assert told == "  ...\n".join(["Traceback (most recent call last):\n", *between]) + "ValueError: nan"
    assert last_lines(told) == told


def last_lines(text: str) -> str:
    lines = root_cause(failure(1, text)).splitlines()[1:-1]
    return "\n".join(line.removeprefix("  ") for line in lines)


def test_nothing_in_it_moves_the_cursor() -> None:
    text = root_cause(failure(1, "\x1b[31mred\x1b[0m\n 10%\r 20%\r 30%\n\x07bell\x00\n" + "x" * 1000))
    assert text.splitlines()[1:-1] == ["  red", "   30%", "  bell", "  " + "x" * 300]


def test_last_words_are_the_recorded_exception(tmp_path: Path) -> None:
    error_file, log = tmp_path / "error.json", tmp_path / "stderr.log"
    extra = {"py_callstack": TRACEBACK, "timestamp": "1"}
    error_file.write_text(json.dumps({"message": {"message": "ValueError: nan", "extraInfo": extra}}))
    log.write_text("something else\n")
    assert last_output(str(error_file), str(log)) == TRACEBACK.rstrip()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"message": "plain"}, "plain"),
        ({"message": {"message": "no traceback"}}, "no traceback"),
        ({"message": {"message": "no traceback", "extraInfo": 3}}, "no traceback"),
        ({"message": 3}, "from the log"),
        ([], "from the log"),
    ],
)
def test_other_shapes_of_the_record(tmp_path: Path, record: object, expected: str) -> None:
    error_file, log = tmp_path / "error.json", tmp_path / "stderr.log"
    error_file.write_text(json.dumps(record))
    log.write_text("from the log\n")
    assert last_output(str(error_file), str(log)) == expected


def test_without_a_record_the_log_speaks(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 200_000 + b"\nwarm up\n" + TRACEBACK.encode() + b"\xff last\n")
    (tmp_path / "error.json").write_text('{"message": ')
    assert last_output(str(tmp_path / "error.json"), str(log)) == TRACEBACK + "\ufffd last"
    log.write_text("one\n\ntwo\n")
    assert last_output("", str(log)) == "one\ntwo"


def test_nothing_is_known(tmp_path: Path) -> None:
    assert last_output(str(tmp_path / "none.json"), str(tmp_path / "none.log")) == ""
    assert last_output("", "") == ""


PEER = "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: Read error: Connection reset by peer\n"
FAILED = Ended(Outcome.FAILED, failure(1), "")


@pytest.mark.parametrize(
    ("round_end", "rank", "text", "told"),
    [
        (Interrupted(0, Reason.NODE_LOST, "n3", "silent"), 1, PEER, True),
        # An agent that joins again is told of the rounds that it has missed.
        (Interrupted(0, Reason.NODE_LOST, "", "this round is over"), 1, PEER, True),
        (Interrupted(0, Reason.WORKER_FAILED, "n2", "rank 5: x"), 1, PEER, True),
        (FAILED, 1, PEER, True),
        (FAILED, 5, TRACEBACK, True),
        # The same mistake in the script ends all workers.
        (Ended(Outcome.FAILED, failure(1, TRACEBACK.rstrip()), ""), 1, TRACEBACK, True),
        (Interrupted(0, Reason.WORKER_FAILED, "n2", "rank 5: ValueError: nan"), 1, TRACEBACK, True),
        # The cause, or perhaps another one.
        (Interrupted(0, Reason.WORKER_FAILED, "n2", "rank 1: x"), 1, PEER, False),
        (Interrupted(0, Reason.NODE_LOST, "n3", "silent"), 1, TRACEBACK, False),
        (FAILED, 1, TRACEBACK, False),
        (Interrupted(0, Reason.NODE_LEFT, "n3", "drained"), 1, PEER, False),
        (None, 1, PEER, False),
    ],
)
def test_last_words_that_another_worker_or_node_explains(
    round_end: Interrupted | Ended | None, rank: int, text: str, *, told: bool
) -> None:
    assert told_elsewhere(round_end, rank, text) is told
