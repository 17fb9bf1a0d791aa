"""What a leader of thousands of agents takes: for its first round, for changes, after its loss, and while it idles.

The leader is the product's, in a process of its own, and so is the one that follows it. All other agents are in other
processes (:mod:`benchmarks.herd`). A row that does not come about within its time says so, and ends the rows of its
size.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.herd import PROCESS_AGENTS, Herd, NotReachedError, Traffic
from benchmarks.leading import GIVEN_LIMITS
from benchmarks.tables import Bar, Results, Table
from benchmarks.usage import process_cpu_seconds, usage
from slurm_elastic.descriptors import raise_limit
from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.membership.events import Interrupted
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import open_records
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rundir import RunDir, incarnation

_BARS = {
    "first round": {1024: 0.5, 4096: 2.0, 16384: 10.0},
    "one killed": {1024: 0.15, 4096: 0.6, 16384: 3.0},
    "leader killed": {1024: 4.0, 4096: 5.0, 16384: 12.0},
}
_IDLE_BARS = {1024: 2.0, 4096: 5.0, 16384: 15.0}
_GROWTH = 4.5
"""Times that a row may grow from one size to the next, which is four times as large."""
RUN, _LIMIT, _IDLE = "scale", 120.0, 20.0


@dataclass(frozen=True, slots=True)
class _Row:
    """What one change took: seconds, the leader's CPU time and the herd's, and the traffic of the herd."""

    wall: float
    leader: float
    herd: float
    traffic: Traffic


def rows_table(title: str, note: str) -> Table:
    """A table for :class:`Rows`, without any yet; `note` says what is peculiar to it."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Table(
        title,
        [
            "agents",
            "what",
            "until all hold their place s",
            "leader CPU s",
            "agents CPU s",
            "messages",
            "MiB",
            "leader resident MiB",
            "load",
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
    found: dict[tuple[str, int], float | None] = {}
    for size in sizes:
        _measure(table, size, found)
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


_ROWS = ("first round", "one killed", "100 killed", "1,000 joining", "leader killed")


def _measure(table: Table, size: int, found: dict[tuple[str, int], float | None]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as place,
        LeadingAgent(Path(place), size, 0) as first,
        LeadingAgent(Path(place), size, 1) as second,
    ):
        herd = Herd(incarnation(RUN, 0), first.run_dir, size)
        try:
            _rows(Rows(table, size, herd, found), first, second)
        finally:
            herd.close()


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

    def __init__(self, table: Table, size: int, herd: Herd, found: dict[tuple[str, int], float | None]) -> None:
        self.table, self.size, self.herd, self.found = table, size, herd, found

    def add(self, what: str, leader: LeadingAgent, change: Callable[[], object], agents: int) -> bool:
        """Make a change, and measure what it takes until so many agents of the herd hold a place in one later round."""
        herd = self.herd
        done = herd.hold_places(agents, herd.newest)
        begin, cpu, own, said = time.monotonic(), leader.cpu(), herd.cpu(), herd.traffic()
        problem = ""
        try:
            change()
            herd.wait(done, _LIMIT)
        except NotReachedError as error:
            problem = f"never: {error}"
        end = time.monotonic() if problem else herd.placed_at
        row = _Row(end - begin, leader.cpu() - cpu, herd.cpu() - own, herd.traffic() - said)
        self.found[what, self.size] = None if problem else row.wall
        self.found[f"{what} CPU", self.size] = None if problem else row.leader
        self._show(what, problem or f"{row.wall:.3f}", row, leader)
        return not problem

    def idle(self, leader: LeadingAgent) -> None:
        """Measure the leader while nothing happens."""
        herd = self.herd
        begin, cpu, own, said = time.monotonic(), leader.cpu(), herd.cpu(), herd.traffic()
        herd.rest(_IDLE)
        wall = time.monotonic() - begin
        row = _Row(wall, leader.cpu() - cpu, herd.cpu() - own, herd.traffic() - said)
        self.found["idle", self.size] = row.leader / wall * 100
        self._show("idle", f"{row.leader / wall * 100:.1f} %", row, leader)

    def _show(self, what: str, wall: str, row: _Row, leader: LeadingAgent) -> None:
        traffic = row.traffic
        self.table.rows.append(
            [
                self.size,
                what,
                wall,
                f"{row.leader:.2f}",
                f"{row.herd:.2f}",
                traffic.messages,
                f"{traffic.bytes / (1 << 20):.1f}",
                f"{leader.resident():.0f}",
                f"{os.getloadavg()[0]:.1f}",
            ]
        )
        print(*self.table.rows[-1], sep="  ", flush=True)


class LeadingAgent:
    """A process with one of the product's agents, without workers: the first leads, the second follows it."""

    def __init__(self, place: Path, nodes: int, position: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.run_dir = RunDir.for_run(place, RUN).open()
        self._process = context.Process(target=_lead, args=(other, place, nodes, position), daemon=True)

    def __enter__(self) -> LeadingAgent:
        self._process.start()
        self.endpoint: tuple[str, int] = ("127.0.0.1", self._pipe.recv())
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()

    def pause(self) -> None:
        """Stop the process; its kernel goes on to accept connections, and to take in what is sent."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the process go on after :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the process as a node ends; its kernel goes on."""
        self._process.kill()
        self._process.join()

    def cpu(self) -> float:
        """User and system time of the process until now, in seconds."""
        assert self._process.pid is not None
        return process_cpu_seconds(self._process.pid)

    def resident(self) -> float:
        """Resident memory of the process in MiB."""
        return usage(self._process.pid).resident


def _lead(pipe: Connection, place: Path, nodes: int, position: int) -> None:
    # What most login shells hand to Slurm; the rest is the product's own doing.
    resource.setrlimit(resource.RLIMIT_NOFILE, GIVEN_LIMITS)
    raise_limit()
    run_dir = RunDir.for_run(place, RUN).open()
    options = RendezvousOptions(min_round_time=0.0)
    config = RendezvousConfig(
        run_id=RUN,
        run_dir=run_dir,
        records=open_records(run_dir, incarnation(RUN, 0), None, limit=60.0),
        restart_count=0,
        incarnation=incarnation(RUN, 0),
        agent=f"n{position}/0.0/0",
        node=f"n{position}",
        position=position,
        address="127.0.0.1",
        local_world_size=8,
        role="default",
        expected_nodes=tuple(f"n{index}" for index in range(nodes)),
        min_nodes=1,
        max_nodes=2 * nodes,
        max_restarts=0,
        may_lead=position == 0,
        leader_host="127.0.0.1",
        ports=(0,),
        options=options,
    )
    coordination = connect(config, lambda decision: None)
    own = config.agent_info(29400)
    coordination.join(own)
    pipe.send(_port(coordination))
    while True:
        if isinstance(coordination.next_event(), Interrupted):
            coordination.join(own)


def _port(coordination: Coordination) -> int:
    return coordination._standby_port
