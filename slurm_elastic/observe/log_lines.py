"""The lines of all workers' logs, merged by time.

Logs have no times. The agent of each node writes down when which bytes came (``times.jsonl``, docs/events.md); a line
has the time at which its last byte was noted, or, where the agent was killed before that or its disk was full, at which
its log was written to last. Lines of one log stay in their order. Logs are read in blocks, and no file stays open,
because a run can have more logs than a process can have files.
"""

from __future__ import annotations

import bisect
import heapq
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurm_elastic import typed_json
from slurm_elastic.rundir import LogFile, RunContents, RunFile

_LEAST_BLOCK, _MOST_BLOCK, _ALL_BLOCKS = 1 << 13, 1 << 20, 1 << 26
"""Bytes that are read of a log at once: few if there are many logs, each of which has a block in memory."""
_LONGEST_LINE = 1 << 20
"""A line that has no end after so many bytes is shown in parts."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a worker's log, at a time by the clock of its node."""

    time: float
    log: LogFile
    text: str


ALL = (range(sys.maxsize),)
"""All numbers."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The lines that are wanted; nodes are None for all."""

    ranks: Collection[range] = ALL
    nodes: Collection[str] | None = None
    rounds: Collection[range] = ALL
    since: float = 0.0
    pattern: re.Pattern[str] = re.compile("")

    def wants_round(self, number: int) -> bool:
        """Return True if logs of this round are wanted."""
        return any(number in numbers for numbers in self.rounds)

    def wants_log(self, log: LogFile) -> bool:
        """Return True if lines of this log are wanted."""
        return any(log.rank in numbers for numbers in self.ranks) and (self.nodes is None or log.node in self.nodes)


_Times = tuple[Sequence[int], Sequence[float]]
"""The sizes of a log, ascending, and the times at which they were noted."""


@dataclass(slots=True)
class _Position:
    offset: int = 0
    rest: bytes = b""


def log_times(file: RunFile) -> Mapping[str, _Times]:
    """Return sizes and times of each log in a file of times; damaged lines are left out. Pure."""
    logs: dict[str, tuple[list[int], list[float]]] = {}
    for line in file.content.split(b"\n"):
        try:
            record = typed_json.loads(line)
            time, grown = float(record["time"]), dict(record["sizes"])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
        for name, size in grown.items():
            if isinstance(size, int):
                sizes, times = logs.setdefault(name, ([], []))
                if not sizes or size > sizes[-1]:
                    sizes.append(size)
                    times.append(max(time, times[-1]) if times else time)
    return logs


class LogReader:
    """Reads the logs of a run, once or again and again while they grow."""

    def __init__(self, contents: RunContents, log_filter: LogFilter) -> None:
        self._contents, self._wanted = contents, log_filter
        self._positions: dict[LogFile, _Position] = {}

    def lines(self, *, last: bool = True) -> Iterator[LogLine]:
        """Yield the lines that were not yielded before, merged by time within each round.

        With `last` nothing will be written any more, so that a line without an end is one, too.
        """
        for number in self._contents.log_rounds():
            if self._wanted.wants_round(number):
                yield from self._of_round(number, last)

    def _of_round(self, number: int, last: bool) -> Iterator[LogLine]:
        logs = [log for log in self._contents.logs(number) if self._wanted.wants_log(log)]
        if not logs:
            return
        times: dict[tuple[str, str], _Times] = {}
        for node, file in self._contents.log_times(number):
            times.update(((node, name), noted) for name, noted in log_times(file).items())
        block = max(_LEAST_BLOCK, min(_MOST_BLOCK, _ALL_BLOCKS // len(logs)))
        sources = []
        for log in logs:
            sizes, noted = times.get((log.node, log.key), ((), ()))
            if last:
                _size, changed = self._contents.size_and_time(log.path)
                sizes, noted = (*sizes, sys.maxsize), (*noted, max((changed, *noted[-1:])))
            sources.append(self._of_log(log, sizes, noted, block, last))
        for line in heapq.merge(*sources, key=lambda line: line.time):
            if line.time >= self._wanted.since and self._wanted.pattern.search(line.text):
                yield line

    def _of_log(
        self, log: LogFile, sizes: Sequence[int], times: Sequence[float], block: int, last: bool
    ) -> Iterator[LogLine]:
        """Yield the lines of a log, as far as their times are known: while it grows, the others are yielded later."""
        position = self._positions.setdefault(log, _Position())

        def shown(line: bytes, end: int) -> LogLine:
            # A progress bar rewrites its line after a carriage return; its last state is what was seen.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            return LogLine(times[bisect.bisect_left(sizes, end)], log, text)

        while sizes and position.offset < sizes[-1]:
            data = self._contents.read(log.path, position.offset, min(block, sizes[-1] - position.offset))
            if not data:
                break
            *lines, rest = (position.rest + data).split(b"\n")
            end = position.offset - len(position.rest)
            position.offset += len(data)
            position.rest = rest
            if len(rest) > _LONGEST_LINE:
                lines.append(rest)
                position.rest = b""
            for line in lines:
                end = min(end + len(line) + 1, position.offset)
                yield shown(line, end)
        if last and position.rest:
            rest, position.rest = position.rest, b""
            yield shown(rest, position.offset)
