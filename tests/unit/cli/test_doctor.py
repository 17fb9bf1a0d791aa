"""How the doctor shows its findings."""

from __future__ import annotations

import sys

import pytest

from slurm_elastic.cli.commands.doctor import _show
from slurm_elastic.finding import Finding, Level

FINE = Finding("slurm.release", Level.OK, "26.05.5")
LIMIT = Finding("slurm.grace", Level.LIMIT, "0 s", "too short", "ask for more")
BROKEN = Finding("node.gpus", Level.BROKEN, "GPU 0: \x1b[31mwrong", "it is", "fix it", ("n1", "n2"))


def test_plain_lines_for_programs_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    _show([FINE, LIMIT, BROKEN])
    told = capsys.readouterr().out.splitlines()
    _show([FINE, LIMIT, BROKEN], everything=True)
    assert capsys.readouterr().out.splitlines() == ["ok      slurm.release: 26.05.5", *told[:-2], told[-1]]
    assert told == [
        "limit   slurm.grace: 0 s",
        "        why: too short",
        "        fix: ask for more",
        "broken  node.gpus [n[1-2]]: GPU 0: ?[31mwrong",
        "        why: it is",
        "        fix: fix it",
        "1 check ok (--all)",
        "runs do not work here: 1 check failed",
    ]


@pytest.mark.parametrize(
    ("found", "last"), [([FINE], "runs work here"), ([FINE, LIMIT, LIMIT], "runs work here, with 2 limits")]
)
def test_the_last_line_says_what_the_exit_code_says(
    found: list[Finding], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(found)
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_terminal_shows_the_same_with_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _show([BROKEN])
    assert capsys.readouterr().out.startswith("\x1b[1;31mbroken  \x1b[0mnode.gpus [n[1-2]]: GPU 0: ?[31mwrong\n")
