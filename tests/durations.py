"""What each test costs, on record: a pytest plugin, and a command that shows the dearest tests.

    python3 -m tests.durations [--most 50] [--by cpu]

tests/conftest.py loads the plugins. Each session of pytest writes the seconds of each of its tests, and those of the
processors, to a file of its own below build/durations; `collect` makes build/durations.json of them at the end of
`make test`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "build"
PARTS = BUILD / "durations"
"""A file for each session that has ended."""
RECORD = BUILD / "durations.json"


CPU = "cpu seconds"


@dataclass
class Duration:
    """Seconds of one test: its fixtures, the test itself, and those of the processors for both."""

    fixtures: float = 0.0
    call: float = 0.0
    cpu: float = 0.0


class Meter:
    """Adds the processors' seconds to the reports, where the tests run.

    They are those of a control group of this process's own, which all that it starts stays in, daemons of a test
    cluster, too (cgroup v1, cpuacct); without one, of this process and the children that it has waited for. Where the
    kernel shares the processors out by groups, too (cpu), each process of pytest-xdist gets as much as another one,
    not each session of theirs (sched(7), autogroup), of which a test cluster has ten times as many.
    """

    def __init__(self, groups: Path = Path("/sys/fs/cgroup")) -> None:
        name = f"tests-{os.urandom(4).hex()}"
        self._groups = [group for controller in ("cpuacct", "cpu") if _join(group := groups / controller / name)]
        usage = groups / "cpuacct" / name / "cpuacct.usage"
        self._usage = usage if usage.exists() else None
        self._last = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = self._seconds()
        report.user_properties.append((CPU, now - self._last))
        self._last = now
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._last = self._seconds()

    def pytest_unconfigure(self) -> None:
        for group in self._groups:
            _leave(group)
        self._groups, self._usage = [], None

    def _seconds(self) -> float:
        if self._usage is None:
            return sum(os.times()[:4])
        return int(self._usage.read_text()) / 1e9


def _join(group: Path) -> bool:
    """Make a control group, and put this process into it; return whether that is possible here."""
    try:
        # Both controllers may be mounted as one.
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        _leave(group)
        return False
    return True


def _leave(group: Path) -> None:
    # Servers that forked for this process end a moment after it.
    with contextlib.suppress(OSError):
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(process)
    with contextlib.suppress(OSError):
        group.rmdir()


class Recorder:
    """Adds up the reports of a session."""

    def __init__(self) -> None:
        self._tests: dict[str, Duration] = defaultdict(Duration)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        duration = self._tests[report.nodeid]
        duration.cpu += sum(seconds for name, seconds in report.user_properties if name == CPU)
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


def table(tests: Mapping[str, Duration], most: int, by: str) -> Iterable[str]:
    """Yield the lines of a table by layer: its sum, then its `most` dearest tests, fixtures apart."""

    def cost(duration: Duration) -> float:
        return duration.cpu if by == "cpu" else duration.call + duration.fixtures

    for name in sorted({layer(test) for test in tests}):
        members = {test: duration for test, duration in tests.items() if layer(test) == name}
        fixtures, calls, cpu = (
            sum(getattr(duration, part) for duration in members.values()) for part in ("fixtures", "call", "cpu")
        )
        yield f"{name}: {len(members)} tests, {calls:.0f} s, {fixtures:.0f} s of fixtures, {cpu:.0f} s of CPU"
        for test, duration in sorted(members.items(), key=lambda item: -cost(item[1]))[:most]:
            seconds = f"{duration.call:8.1f} s {duration.fixtures:6.1f} s of fixtures {duration.cpu:6.1f} s of CPU"
            yield f"{seconds}  {test.partition('/')[2]}"


def main() -> int:
    """Show the table."""
    parser = argparse.ArgumentParser(prog="tests.durations", description=__doc__)
    parser.add_argument("--most", type=int, default=50, help="tests of each layer (default: 50)")
    parser.add_argument("--by", choices=("time", "cpu"), default="time", help="what makes a test dear (default: time)")
    arguments = parser.parse_args()
    tests = collect()
    if not tests:
        parser.exit(1, "no test is on record: run `make test` first\n")
    print("\n".join(table(tests, arguments.most, arguments.by)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
