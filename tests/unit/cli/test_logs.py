from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.cli.commands.logs import _since
from tests.conftest import Cli
from tests.local.waiting import meanwhile
from tests.unit.observe.runs import WrittenRun
from tests.unit.observe.test_log_lines import log, written

Out = Callable[..., list[str]]
A, B = "n1/7.0/100", "n2/7.0/200"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    run = WrittenRun(tmp_path)
    run.round(1, 0, [A, B])
    written(log(run, 0, "n1", 0), 0, (1.5, "loss 1\n"), (4.0, "loss 2\x1b[2J\n"))
    written(log(run, 0, "n2", 2, "stderr"), 2, (3.0, "a warning\n"))
    return run


@pytest.fixture
def out(run: WrittenRun, cli: Cli) -> Out:
    """The lines that the command prints about the run."""
    return lambda *arguments: cli(0, "logs 7", *arguments).out.splitlines()


def test_all_lines(run: WrittenRun, out: Out) -> None:
    assert out() == [
        "00:00:01.500 [n1/0] loss 1",
        "00:00:03.000 [n2/2] a warning",
        "00:00:04.000 [n1/0] loss 2?[2J",
    ]


def test_chosen_lines(run: WrittenRun, out: Out) -> None:
    written(log(run, 1, "n1", 0), 0, (9.0, "loss 3\n"))
    assert out("--rank=1-2") == ["00:00:03.000 [n2/2] a warning"]
    assert out("--node=n[2-9]") == ["00:00:03.000 [n2/2] a warning"]
    assert out("--round=last") == ["00:00:09.000 [n1/0] loss 3"]
    assert out("--grep=loss [23]", "--round=0") == ["00:00:04.000 [n1/0] loss 2?[2J"]
    assert out("--since=1970-01-01T00:00:03.5+00:00", "--rank=0-999999999") == [
        "00:00:04.000 [n1/0] loss 2?[2J",
        "00:00:09.000 [n1/0] loss 3",
    ]
    assert out("--since=10min") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(([f"--rank={x}"], f"--rank {x!r} is no list of numbers; write it as in 0,4-7") for x in ("x", "1,", "1-2-3")),
        (["--round=5-3"], "--round '5-3' is no list of numbers; write it as in 0,2-4 or last"),
        (["--grep=("], "--grep '(' is no regular expression"),
        (["--since=soon"], "--since 'soon' is no time; write it as in 90s, 10min, 2h, 14:05"),
        (["--rank=9"], "no logs of these ranks and nodes in run 7; it has ranks 0,2 on n[1-2]"),
        (["--round=9"], "run 7 has no logs of round 9; rounds with logs: 0"),
        (["--errors", "--follow"], "--errors shows failures that are over; leave out --follow"),
        (["--errrors"], "no option --errrors; did you mean --errors?"),
    ],
)
def test_mistakes(run: WrittenRun, cli: Cli, arguments: list[str], message: str) -> None:
    err = cli(2, "logs 7", *arguments).err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_run_without_logs(run: WrittenRun, tmp_path: Path, cli: Cli) -> None:
    WrittenRun(tmp_path, "8")
    assert "run 8 has no logs; its workers have not started, or write none" in cli(2, "logs 8").err
    assert cli(0, "logs 8 --errors").out == "no failures in run 8\n"


def test_follow_ends_with_the_run(run: WrittenRun, out: Out) -> None:
    def goes_on() -> None:
        written(log(run, 1, "n1", 0), 0, (9.0, "the next round\n"), (10.0, "no end of line"))
        run.run_dir.mark_done({"outcome": "succeeded"})

    with meanwhile(goes_on, after=0.5):
        texts = [line.partition("] ")[2] for line in out("--follow")]
    assert texts == ["loss 1", "a warning", "loss 2?[2J", "the next round", "no end of line"]


def test_errors(run: WrittenRun, out: Out) -> None:
    failure = {"agent": B, "node": "n2", "rank": 3, "message": "Traceback\nImportError: no", "log": "/l"}
    run.run_dir.publish_record(failure, "failures", "7.0")
    log(run, 0, "n1", 1, "stderr").write_text("Traceback (most recent call last):\nRuntimeError: closed\n")
    assert out("--errors") == [
        "round 0: the run failed",
        "root cause: rank 3 on n2: a module is missing (user code), a restart will not help",
        "  Traceback",
        "  ImportError: no",
        "  what can help: activate the environment in the batch script, before srun",
        "  the rest: /l",
        "followed from it:",
        "  rank 1: RuntimeError: closed",
    ]


def test_since() -> None:
    now = datetime.datetime(2026, 3, 4, 15, 0, 0).astimezone().timestamp()
    ago = {"90s": 90, "10min": 600, "2m": 120, "1.5h": 5400, "1d": 86400, "14:59": 60, "9:00:30": 21570}
    assert {text: now - _since(text, now) for text in ago} == ago
