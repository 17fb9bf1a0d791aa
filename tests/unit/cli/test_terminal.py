"""What commands show where there is no UTF-8, no colour and no room, as with LC_ALL=C, in a pipe, or in 40 columns."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from slurm_elastic.rundir import join_named
from tests.unit.observe.runs import WrittenRun

A, B = "n1/7.0/100", "n2/7.0/200"
WORDS = ["status 7", "status 7 --workers", "list", "report 7 --output page.html", "logs 7 --errors"]


class Narrow(io.TextIOWrapper):
    """A terminal that shows ASCII alone."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path / "gr\u00f6\u00dfe"
    base.mkdir()
    run = WrittenRun(base)
    join_named(run.run_dir, ["train.py", "--name", "\u2603"], again=False)
    run.started(0, A)
    run.started(0, B)
    run.round(1, 0, [A, B])
    run.ended(9, 0, [A, B], 1, step=250, steps=250, first=1.0, last=8.0)
    failure = {"agent": A, "node": "n1", "rank": 0, "exit_code": 1, "message": "ValueError: \u2603"}
    run.run_dir.publish_record(failure, "failures", "7.0")
    run.event(9, "n1", "run_ended", "the run failed: \u2603", outcome="failed", nodes=["n1"], rank=0)
    monkeypatch.chdir(base)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("COLUMNS", "40")
    return base


@pytest.mark.parametrize("kind", [Narrow, io.TextIOWrapper])
@pytest.mark.parametrize("words", WORDS)
def test_nothing_breaks(base: Path, monkeypatch: pytest.MonkeyPatch, words: str, kind: type[io.TextIOWrapper]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", kind(io.BytesIO(), encoding="ascii"))
        code = main(words.split())
        sys.stdout.flush()
        text = sys.stdout.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert code in (0, 1, 4)
    if words.startswith("report"):
        assert "\u2603" in (base / "page.html").read_text(encoding="utf-8")
    elif words.startswith(("status", "logs")):
        assert "ValueError: \\u2603" in text
    if kind is not Narrow:
        assert "\x1b" not in text
