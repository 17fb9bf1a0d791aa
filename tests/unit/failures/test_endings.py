"""The line that names the error, in the ends of output of training scripts in the shape of public ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_elastic.failures.causes import ending, error_line

HEADER = "Traceback (most recent call last):"
_TEXT = Path(__file__).with_name("endings.txt").read_text()
ENDINGS = [each.split("\n", 2) for each in _TEXT.removeprefix("=== ").split("\n=== ")]


@pytest.mark.parametrize(("right", "text"), [each[1:] for each in ENDINGS], ids=[each[0] for each in ENDINGS])
@pytest.mark.parametrize("before", ["", "warm up\n" * 300])
def test_the_right_line_names_the_error(right: str, text: str, before: str) -> None:
    assert error_line(before + text) == right.removeprefix("right: ")


@pytest.mark.parametrize(("right", "text"), [each[1:] for each in ENDINGS], ids=[each[0] for each in ENDINGS])
def test_what_is_shown_has_it(right: str, text: str) -> None:
    """Also where no more is kept, as in the record of a failed run."""
    kept = ending(text)
    assert right.removeprefix("right: ") in kept
    assert error_line(kept) == right.removeprefix("right: ")


def test_there_are_many() -> None:
    assert len(ENDINGS) >= 60


def test_what_is_ignored_is_not_shown() -> None:
    (text,) = [each[2] for each in ENDINGS if each[0] == "logging that fails at the end"]
    assert ending(text).split("\n")[-1] == "ValueError: loss is nan"
    alone = f"Exception ignored in: <function f>\n{HEADER}\n  File 'x'\nImportError: x"
    assert error_line(alone) == "ImportError: x", "nothing else is known"
    assert ending("") == error_line("") == ""
