"""How long each test takes, on record: a pytest plugin, and a command that shows the dearest tests.

    python3 -m tests.durations [--most 50]

tests/conftest.py loads the plugin. Each session of pytest writes the seconds of each of its tests to a file of its own
below build/durations; `collect` makes build/durations.json of them at the end of `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "build"
PARTS = BUILD / "durations"
"""A file for each session that has ended."""
RECORD = BUILD / "durations.json"


@dataclass
class Duration:
    """Seconds of one test: its fixtures, and the test itself."""

    fixtures: float = 0.0
    call: float = 0.0


class Recorder:
    """Adds up the reports of a session."""

    def __init__(self) -> None:
        self._tests: dict[str, Duration] = defaultdict(Duration)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        duration = self._tests[report.nodeid]
        if report.when == "call":
            duration.call += report.duration
        else:
            duration.fixtures += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._tests:
            PARTS.mkdir(parents=True, exist_ok=True)
            text = json.dumps({name: asdict(duration) for name, duration in self._tests.items()})
            (PARTS / f"{os.getpid()}-{os.urandom(4).hex()}.json").write_text(text)


def collect() -> dict[str, Duration]:
    """Put the parts into the record, remove them, and return what is on record of every test."""
    tests: dict[str, dict[str, float]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for part in sorted(PARTS.glob("*.json"), key=lambda path: path.stat().st_mtime):
        tests |= json.loads(part.read_text())
        part.unlink()
    if tests:
        RECORD.write_text(json.dumps(tests, indent=1, sort_keys=True) + "\n")
    return {name: Duration(**seconds) for name, seconds in tests.items()}


def layer(test: str) -> str:
    """Return the layer of a test by its id: tests/unit/test_x.py::test_y is of the layer unit."""
    return test.split("/")[1]


def table(tests: Mapping[str, Duration], most: int) -> Iterable[str]:
    """Yield the lines of a table by layer: its sum, then its `most` dearest tests, fixtures apart."""
    for name in sorted({layer(test) for test in tests}):
        members = {test: duration for test, duration in tests.items() if layer(test) == name}
        fixtures, calls = (sum(getattr(each, part) for each in members.values()) for part in ("fixtures", "call"))
        yield f"{name}: {len(members)} tests, {calls:.0f} s, and {fixtures:.0f} s of fixtures"
        dearest = sorted(members.items(), key=lambda item: -(item[1].call + item[1].fixtures))[:most]
        for test, duration in dearest:
            yield f"{duration.call:8.1f} s {duration.fixtures:6.1f} s of fixtures  {test.partition('/')[2]}"


def main() -> int:
    """Show the table."""
    parser = argparse.ArgumentParser(prog="tests.durations", description=__doc__)
    parser.add_argument("--most", type=int, default=50, help="tests of each layer (default: 50)")
    arguments = parser.parse_args()
    tests = collect()
    if not tests:
        parser.exit(1, "no test is on record: run `make test` first\n")
    print("\n".join(table(tests, arguments.most)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
