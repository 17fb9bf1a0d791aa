"""Whether a failure is the one before again."""

from __future__ import annotations

import pytest

from slurm_elastic.failures.causes import BEFORE_FIRST_STEP, attribute, fingerprint, position

RAISED = 'Traceback (most recent call last):\n  File "train.py", line {line}, in step\n    step()\n{words}'


def of(words: str, where: str | None, line: int = 7, exit_code: int = 1, prefix: str = "") -> str:
    text = RAISED.format(line=line, words=words)
    text = "".join(f"{prefix}{each}\n" for each in text.split("\n"))
    return fingerprint(attribute(text, exit_code), text, exit_code, where)


FIRST = of("ValueError: sample 17 is bad", "at step 7")


@pytest.mark.parametrize(
    ("second", "same"),
    [
        (of("ValueError: sample 17 is bad", "at step 7"), True),
        (of("ValueError: sample 18 is bad", "at step 7"), True),
        (of("ValueError: sample 17 is bad\nhint: see the page", "at step 7"), True),
        (of("ValueError: sample 17 is bad", "at step 7", prefix="[rank1]: "), True),
        (of("ValueError: sample 17 is bad", "at step 8"), False),
        (of("ValueError: sample 17 is bad", BEFORE_FIRST_STEP), False),
        (of("ValueError: batch 17 is bad", "at step 7"), False),
        (of("ValueError: sample 17 is bad", "at step 7", line=8), False),
        (of("ValueError: sample 17 is bad", "at step 7", exit_code=2), False),
    ],
)
def test_the_same_root_at_the_same_step(second: str, same: bool) -> None:
    assert FIRST != ""
    assert (second == FIRST) is same


@pytest.mark.parametrize("where", [BEFORE_FIRST_STEP, "at step 7", None])
@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("RuntimeError: Connection closed by peer [127.0.0.1]:1", 1),
        ("", -9),
        ("", -15),
        ("OSError: [Errno 116] Stale file handle", 1),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1),
    ],
)
def test_what_is_never_compared(text: str, exit_code: int, where: str | None) -> None:
    assert fingerprint(attribute(text, exit_code), text, exit_code, where) == ""


@pytest.mark.parametrize(
    ("words", "exit_code", "compared"),
    [("ModuleNotFoundError: No module named 'x'", 1, True), ("ValueError: no", 1, False), ("epoch 3", 3, False)],
)
def test_a_script_that_does_not_say_where_it_was(words: str, exit_code: int, compared: bool) -> None:
    assert (of(words, None, exit_code=exit_code) != "") is compared


def test_hangs_are_the_same_at_the_same_step() -> None:
    first, second, later = (
        fingerprint(attribute(text, -9), text, -9, where)
        for text, where in (
            ("by the watchdog: no step for 60.1 s", "at step 7"),
            ("by the watchdog: no step for 60.2 s; process 4711", "at step 7"),
            ("by the watchdog: no step for 60.2 s", "at step 8"),
        )
    )
    assert "" != first == second != later


@pytest.mark.parametrize(
    ("calls", "step", "where"),
    [
        (None, None, None),
        (0, None, BEFORE_FIRST_STEP),
        (7, None, None),
        (7, 107, "at step 107"),
    ],
)
def test_where_a_worker_was(calls: int | None, step: int | None, where: str | None) -> None:
    assert position(calls, step) == where
