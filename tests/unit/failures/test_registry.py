"""Each row of the registry of failures is found by what it stands for, and by no other row's text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_elastic.failures.causes import (
    BY_KERNEL,
    Attribution,
    Cause,
    attribute,
    explanation,
    named,
    registry,
)
from tests import planted_faults
from tests.local.agent.scripts.faults import FAULTS

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
EXAMPLES = [
    (name, " ".join(text).replace("\\n", "\n"), int(exit_code))
    for name, exit_code, *text in (
        line.split(maxsplit=2) for line in Path(__file__).with_name("examples.txt").read_text().splitlines()
    )
]
"""Of each row: its name, what a worker has written, and its exit code. A line break there is a \\n in the file."""
GPU_MEMORY = next(text for _, text, _ in EXAMPLES if text.startswith("torch.OutOfMemoryError"))


INNOCENT = (
    "",
    "epoch 3 loss 0.25",
    "UserWarning: this is slow",
    'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: told to fail',
)
"""Texts that tell no cause but that a script has failed."""


@pytest.mark.parametrize("row", registry(), ids=lambda row: row.name)
def test_a_row_takes_no_failures_from_others(row: Cause) -> None:
    assert row.text is not None or row.signals
    if row.title and row.text is not None:
        assert not any(map(row.text.search, INNOCENT))


def test_every_row_has_an_example() -> None:
    assert {row.name for row in registry()} == {name for name, _, _ in EXAMPLES}


@pytest.mark.parametrize(("name", "text", "exit_code"), EXAMPLES)
def test_a_row_is_found(name: str, text: str, exit_code: int) -> None:
    assert attribute(text, exit_code).cause.name == name
    if not text.startswith(("by the ", "Traceback")) and exit_code > 0:
        frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
        assert attribute(f"epoch 3\n{frames}{text}\n", exit_code).cause.name == name
        prefixed = "".join(f"[rank3]: {line}\n" for line in f"{frames}{text}".split("\n"))
        assert attribute(prefixed, exit_code).cause.name == name


def test_the_page_has_every_row() -> None:
    table, _, faults = PAGE.read_text().partition("## Faults that are tested")
    told = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|", table, flags=re.MULTILINE)
    words = {"not_again": "does not help", "again": "helps", "elsewhere": "elsewhere"}
    assert told == [
        (
            row.name,
            row.title or "as its message says",
            row.domain_words,
            words.get(row.outlook, "?"),
        )
        for row in registry()
    ]
    # `python -m tests.planted_faults` prints it.
    assert [line for line in faults.splitlines() if line.startswith("|")] == planted_faults.table()


def test_each_planted_fault_has_a_test_and_those_of_rounds_are_planted() -> None:
    tests = PAGE.parents[1] / "tests"
    for each in planted_faults.FAULTS:
        file, _, function = each.test.partition("::")
        text = (tests / file).read_text()
        assert re.search(rf"^def {function}\(", text, flags=re.MULTILINE), each.test
        # It compares the row's action with what the run has done.
        assert each.test == planted_faults.EACH_ROUND or f'"{each.fault}"' in text, each.fault
        assert each.cause in ("", "unknown") or named(each.cause) is not None
    of_rounds = [each.cause for each in planted_faults.FAULTS if each.test == planted_faults.EACH_ROUND]
    assert of_rounds == [cause for cause, _ in FAULTS]
    assert len(planted_faults.FAULTS) >= 25


def test_nothing_is_known_of_an_exit_code_alone() -> None:
    assert attribute("", 3) == attribute("just a warning", 3)
    assert attribute("", 3).cause.name == "unknown"
    assert explanation("unknown") == explanation("exception") == explanation("of a later release") == ""


def test_what_was_survived_is_no_cause() -> None:
    survived = "WARNING: Connection reset by peer, trying again\n" + "epoch\n" * 50
    assert attribute(survived, 3).cause.name == "unknown"
    handled = f"Traceback (most recent call last):\n{PEER}\nTraceback (most recent call last):\nNameError: x"
    assert attribute(handled, 1).cause.name == "mistake"
    # It was killed from outside, whatever it had said before.
    assert attribute(GPU_MEMORY, -9).cause.name == "killed"


def test_who_uses_the_memory() -> None:
    found = attribute(GPU_MEMORY, 1)
    assert found.detail == "process 4711 has 12.50 GiB memory in use, this process has 65.2 GiB memory in use"
    assert explanation(found.cause.name, found.detail) == (
        f"out of GPU memory (user code), a restart will not help; {found.detail}"
    )
    killed = attribute(f"{BY_KERNEL}out of memory on n1; rank 1 has 3 GiB\nepoch 3", -9)
    assert killed == Attribution(registry()[1], "out of memory on n1; rank 1 has 3 GiB")
