"""What a leader of thousands of agents takes: for its first round, for changes, after its loss, and while it idles.

The leader is the product's, in a process of its own, and so is the one that follows it. All other agents are in other
processes (:mod:`benchmarks.herd`). A row that does not come about within its time says so, and ends the rows of its
size.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

from benchmarks.herd import PROCESS_AGENTS, Herd, NotReachedError
from benchmarks.leading import GIVEN_LIMITS, LIMIT, LeadingAgent, running
from benchmarks.tables import Bar, Cell, Results, Table

_BARS = {
    "first round": {1024: 0.5, 4096: 2.0, 16384: 10.0},
    "one killed": {1024: 0.15, 4096: 0.6, 16384: 3.0},
    "leader killed": {1024: 4.0, 4096: 5.0, 16384: 12.0},
}
_IDLE_BARS = {1024: 2.0, 4096: 5.0, 16384: 15.0}
_GROWTH = 4.5
"""Times that a row may grow from one size to the next, which is four times as large."""
_ROWS = ("first round", "one killed", "100 killed", "1,000 joining", "leader killed")
_IDLE = 20.0

Found = dict[tuple[str, int], float | None]
"""What was measured, by row and number of agents."""


def rows_table(title: str, note: str) -> Table:
    """A table for :class:`Rows`, without any yet; `note` says what is peculiar to it."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Table(
        title,
        [
            *("agents", "what", "until all hold their place s", "leader CPU s", "agents CPU s"),
            *("messages", "MiB", "leader resident MiB", "load"),
        ],
        note=f"The leader's process begins with a limit of {GIVEN_LIMITS[0]} open files and raises it itself to "
        f"{GIVEN_LIMITS[1]}. Processes with up to {PROCESS_AGENTS:,} agents each play all other agents; each of them "
        f"may open {own} files, which the benchmark has raised from what it was given, and has a lower priority than "
        "the leader (nice 10). Each agent listens at an address of its own, where a leader can see that it lives; what "
        "these agents answer each other takes no connection. "
        "CPU: user and system time of these processes; leader killed: of the next leader. Messages both ways, without "
        f"handshakes; bytes with them. {note} Load: of the machine in the last minute.",
    )


def measure(results: Results, sizes: list[int]) -> None:
    """Measure, show and judge all rows for these numbers of agents."""
    table = rows_table("Thousands of agents", f"Idle: for {_IDLE:.0f} s, CPU in % of a core.")
    found: Found = {}
    for size in sizes:
        with running(size, 0, 1) as (herd, (first, second)):
            _rows(Rows(table, size, herd, found), first, second)
    results.add(table)
    for what, bars in _BARS.items():
        for size, most in bars.items():
            if size in sizes:
                results.bars.append(Bar.at_most(f"{size:,} agents: {what}", found.get((what, size)), most))
    for size, most in _IDLE_BARS.items():
        if size in sizes:
            results.bars.append(
                Bar.at_most(f"{size:,} agents: leader's CPU idle", found.get(("idle", size)), most, "%")
            )
    for small in sizes:
        for what in _ROWS:
            before, after = found.get((f"{what} CPU", small)), found.get((f"{what} CPU", 4 * small))
            if before and after:
                promise = f"{what}: leader's CPU at {4 * small:,} beside {small:,} agents"
                results.bars.append(Bar.at_most(promise, after / before, _GROWTH, "times"))


def _rows(rows: Rows, first: LeadingAgent, second: LeadingAgent) -> None:
    size, herd = rows.size, rows.herd
    if not rows.add("first round", first, lambda: herd.add(range(2, size)), size - 2):
        return
    herd.rest(3.0)
    rows.idle(first)
    if not rows.add("one killed", first, lambda: herd.kill([size // 2]), size - 3):
        return
    if not rows.add("100 killed", first, lambda: herd.kill(herd.first(100)), size - 103):
        return
    more = range(size, size + 1000)
    if not rows.add("1,000 joining", first, lambda: herd.add(more), size + 897):
        return
    herd.rest(3.0)
    rows.add("leader killed", second, first.kill, size + 897)


class Rows:
    """The rows of one size."""

    def __init__(self, table: Table, size: int, herd: Herd, found: Found) -> None:
        self.table, self.size, self.herd, self.found = table, size, herd, found

    def add(self, what: str, leader: LeadingAgent, change: Callable[[], object], agents: int) -> bool:
        """Make a change, and measure what it takes until so many agents of the herd hold a place in one later round."""
        herd = self.herd
        done = herd.hold_places(agents, herd.newest)
        begin, before = time.monotonic(), self._used(leader)
        problem = ""
        try:
            change()
            herd.wait(done, LIMIT)
        except NotReachedError as error:
            problem = f"never: {error}"
        taken = herd.placed_at - begin
        cpu = self._show(what, problem or f"{taken:.3f}", before, leader)
        self.found[what, self.size] = None if problem else taken
        self.found[f"{what} CPU", self.size] = None if problem else cpu
        return not problem

    def idle(self, leader: LeadingAgent) -> None:
        """Measure the leader while nothing happens."""
        begin, before = time.monotonic(), self._used(leader)
        self.herd.rest(_IDLE)
        share = 100 * (leader.cpu() - before[0]) / (time.monotonic() - begin)
        self.found["idle", self.size] = share
        self._show("idle", f"{share:.1f} %", before, leader)

    def _used(self, leader: LeadingAgent) -> tuple[float, float, int, float]:
        """CPU seconds of leader and herd until now, and the messages and MiB of the herd."""
        traffic = self.herd.traffic()
        return leader.cpu(), self.herd.cpu(), traffic.messages, traffic.bytes / (1 << 20)

    def _show(self, what: str, wall: str, before: tuple[float, ...], leader: LeadingAgent) -> float:
        """Show a row, and return the leader's CPU seconds in it."""
        cpu, own, messages, mib = (now - then for now, then in zip(self._used(leader), before, strict=True))
        used: list[Cell] = [f"{cpu:.2f}", f"{own:.2f}", int(messages), f"{mib:.1f}", f"{leader.usage().resident:.0f}"]
        self.table.rows.append([self.size, what, wall, *used, f"{os.getloadavg()[0]:.1f}"])
        print(*self.table.rows[-1], sep="  ", flush=True)
        return cpu
