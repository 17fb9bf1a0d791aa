"""What a leader of thousands of agents makes of strangers, of agents that say nothing, and of a pause of its own.

Each row has a run of its own, or follows another one: those of :mod:`benchmarks.scale`, with something that should not
happen.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks.leading import LIMIT, LeadingAgent, running
from benchmarks.scale import Found, Rows, rows_table
from benchmarks.tables import Bar, Results, Table
from slurm_elastic.rendezvous.leader_client import find_leader

_STRANGERS, _SILENT, _PAUSE = 10_000, 100, 5.0
_FIRST, _MUTE, _FALLEN, _PAUSED, _AFTER = (
    f"first round among {_STRANGERS:,} strangers",
    f"first round, {_SILENT} say nothing",
    f"{_SILENT} fall silent",
    f"first round, leader paused for {_PAUSE:.0f} s",
    f"leader paused for {_PAUSE:.0f} s, one killed",
)
_BARS = {_FIRST: 5.0, _MUTE: 35.0, _FALLEN: 8.0, _PAUSED: 10.0, _AFTER: 10.0}
"""Seconds for 1,024 agents. Those that say nothing are waited for as long as `last_call_timeout` says: 30 s."""

_FLOOD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
leader = ("127.0.0.1", int(sys.argv[1]))
for number in range(int(sys.argv[2])):
    held.append(socket.create_connection(leader, source_address=(f"127.0.0.{2 + number % 200}", 0)))
    # Some have begun to say something.
    held[-1].send(bytes(number % 4))
    if number == 500:
        print("on their way", flush=True)
sys.stdin.read()
"""


def measure(results: Results, sizes: list[int]) -> None:
    """Measure, show and judge all rows for these numbers of agents."""
    note = (
        "A pause counts in the time of its row; so long a one may make another agent lead. CPU time is that of the one "
        "that led before."
    )
    table = rows_table("Thousands of agents, disturbed", note)
    found: Found = {}
    for size in sizes:
        _strangers(table, size, found)
        _silent(table, size, found)
        _paused(table, size, found)
    results.add(table)
    for what, most in _BARS.items():
        if 1024 in sizes:
            results.bars.append(Bar.at_most(f"1,024 agents: {what}", found.get((what, 1024)), most))


def _strangers(table: Table, size: int, found: Found) -> None:
    with running(size, 0, 1) as (herd, (leader, _)):
        command = [sys.executable, "-c", _FLOOD, str(leader.port), str(_STRANGERS)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
            assert flood.stdout is not None
            flood.stdout.readline()
            Rows(table, size, herd, found).add(_FIRST, leader, lambda: herd.add(range(2, size)), size - 2)
            flood.kill()


def _silent(table: Table, size: int, found: Found) -> None:
    with running(size, 0, 1) as (herd, (leader, _)):
        rows = Rows(table, size, herd, found)

        def come() -> None:
            herd.add(range(2, size))
            herd.mute(range(2, 2 + _SILENT))

        if rows.add(_MUTE, leader, come, size - 2 - _SILENT):
            herd.rest(3.0)
            rows.add(_FALLEN, leader, lambda: herd.mute(range(size - _SILENT, size)), size - 2 - 2 * _SILENT)


def _paused(table: Table, size: int, found: Found) -> None:
    with running(size, 0, 1) as (herd, leaders):
        rows = Rows(table, size, herd, found)

        def pause() -> None:
            leader = _leading(leaders)
            leader.pause()
            herd.rest(_PAUSE)
            leader.go_on()

        def come() -> None:
            herd.add(range(2, size))
            # Each says two things at once when it is connected, so this is half of them.
            herd.wait(lambda: herd.traffic().messages >= size, LIMIT)
            pause()

        def lose() -> None:
            pause()
            herd.kill([size // 2])

        if rows.add(_PAUSED, leaders[0], come, size - 2):
            herd.rest(3.0)
            rows.add(_AFTER, _leading(leaders), lose, size - 3)


def _leading(leaders: Sequence[LeadingAgent]) -> LeadingAgent:
    port = find_leader(leaders[0].run_dir).port
    return next(leader for leader in leaders if leader.port == port)
