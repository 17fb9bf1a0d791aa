"""The output of commands: tables, times, ranks, findings, and colours on a terminal that shows them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence

from slurm_elastic.finding import Finding, Level
from slurm_elastic.observe.views import RunState
from slurm_elastic.slurm import compress
from slurm_elastic.text import local_time, printable

COLOURS = {
    RunState.RUNNING: ("green", 32),
    RunState.WAITING: ("yellow", 33),
    RunState.FINISHED: ("cyan", 36),
    RunState.FAILED: ("red", 31),
    RunState.STOPPED: ("magenta", 35),
}
"""By their names, and by their numbers on a terminal (ECMA-48, SGR)."""
BOLD, FAINT, RED = "1", "2", "31"


def styled(text: str, rendition: str) -> str:
    """Return text in a rendition (ECMA-48, SGR) if stdout is a terminal that shows colours."""
    # https://no-color.org
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{rendition}m{text}\x1b[0m" if colours else text


def state_text(state: RunState, width: int = 0) -> str:
    """Return the name of a state in its colour, filled up to a width."""
    return styled(state.value.ljust(width), f"1;{COLOURS[state][1]}")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of text as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def ago(seconds: float) -> str:
    """Return a duration in a few characters."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def clock(seconds: float, now: float) -> str:
    """Return a time in the zone of this machine, with its date if it is not of today."""
    when, today = (local_time(moment) for moment in (seconds, now))
    return when.strftime("%H:%M:%S" if when.date() == today.date() else "%Y-%m-%d %H:%M:%S")


def rank_list(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ``0-7,16-23``."""
    ascending = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = ([number for _, number in span] for _, span in ascending)
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


_LEVELS = {Level.OK: "32", Level.UNKNOWN: "33", Level.LIMIT: "33", Level.BROKEN: f"1;{RED}"}


def show_findings(findings: Iterable[Finding]) -> None:
    """Print a few lines for each finding."""
    for finding in findings:
        about = compress(finding.nodes) if finding.nodes else printable(finding.place, 200)
        level = styled(f"{finding.level.value:<8}", _LEVELS[finding.level])
        print(f"{level}{finding.check}{f' [{about}]' if about else ''}: {printable(finding.found, 1000)}")
        for name, text in (("why", finding.why), ("fix", finding.fix)):
            if text:
                print(f"        {name}: {printable(text, 1000)}")
