"""Tests that are text: what is given, what happens, and beneath each event what is decided. See docs/testing.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")

FOLDER = Path(__file__).parents[1] / "testdata"


class Machine(Protocol):
    """A machine, and time that passes for it."""

    def handle(self, event: str) -> list[str]:
        """Return a line for each decision on an event."""
        ...


def cases(path: Path) -> list[str]:
    """Return the cases of a file: paragraphs that are not comments alone."""
    return [text for text in path.read_text().strip().split("\n\n") if re.search("^[^#]", text, re.MULTILINE)]


def played(case: str, start: Callable[[str], Machine]) -> str:
    """Return a case with what the machine decides on each of its events."""
    machine = None
    lines: list[str] = []
    for line in case.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line.startswith("given "):
            machine = start(line.removeprefix("given "))
        elif not line.startswith("#"):
            assert machine is not None, f"nothing is given before: {line}"
            lines += [f"    {decision}" for decision in machine.handle(line)]
    return "\n".join(lines)


def words(text: str | None, *known: str) -> dict[str, str]:
    """Return what a list such as `in 3 s, hung, message it hangs` says, by the first word of each entry."""
    entries = (entry.partition(" ") for entry in (text or "").split(", ") if entry)
    found = {word: rest for word, _, rest in entries}
    assert not known or found.keys() <= {*known}, f"none of {known}: {text}"
    return found


def number(text: str | None) -> Any:
    """Return the first number in a text, None if there is none."""
    found = re.search(r"-?\d+(\.\d*)?(e\d+)?", text or "")
    return None if found is None else float(found[0]) if found[1] or found[2] else int(found[0])


def events(line: str, table: dict[str, Callable[..., Value]]) -> Iterator[Value]:
    """Yield the events that a line describes, made by that entry of the table which matches it as a whole.

    Of several names in the group `each`, one event for each.
    """
    for pattern, make in table.items():
        if found := re.fullmatch(pattern, line):
            groups = found.groupdict()
            each = groups.pop("each", None)
            yield from (make(**groups),) if each is None else (make(name, **groups) for name in each.split())
            return
    raise ValueError(f"no event: {line}")
