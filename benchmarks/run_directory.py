"""What the agents of a run ask of the file system that has the run directory: calls that take a path, per agent.

    python -m benchmarks.run_directory [--json FILE] [--sizes 3,6]

Real agents on this machine, each on a node by its environment, with one worker that needs no torch. strace counts the
calls of each agent and its worker whose path is in the run directory: until all workers of the first round run; from
then on, while nothing happens; from the end of one agent until all workers of the next round run; and from the end of
the workers on.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import sandbox
from benchmarks.options import add_sizes, make_parser
from benchmarks.tables import Bar, Cell, Results, Table
from tests.local.agents import WORKER, Allocation, agent_command, allocation
from tests.local.waiting import eventually

_REST = 10.0
"""Seconds in which nothing happens."""
_SETTLING = 1.0
"""Seconds after the start of the last worker until a start, or a change, counts as over."""
_PHASES = ("start", "rest", "change", "end")
_CHANGES = {"mkdir", "link", "rename", "unlink", "rmdir"}
"""Calls that change a directory; so does the first one that opens a file with O_CREAT."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call with a path in the run directory.

    Attributes:
        phase: One of `_PHASES`.
        directory: Part of the run directory in which the path is; empty for itself.
        changed: Whether it made, renamed or removed something in a directory that other agents use, too.
    """

    phase: str
    directory: str
    changed: bool


def main() -> int:
    """Measure, show and judge."""
    parser = make_parser("run_directory")
    add_sizes(parser, "--sizes", 3, 6)
    options = parser.parse_args()
    sandbox.enter("benchmarks.run_directory")
    results = Results.of("run_directory")
    calls = {size: _measure(size) for size in options.sizes}
    results.add(_per_phase(calls))
    results.add(_per_directory(calls[max(calls)]))
    small, large = min(calls), max(calls)
    for who, agents in (("the agent that leads", slice(0, 1)), ("any other agent", slice(1, None))):
        for phase in ("start", "change", "end"):
            before, after = (_most(calls[size][agents], phase) for size in (small, large))
            promise = f"{phase}, {who}: calls in a run of {large} nodes beside one of {small}"
            results.bars.append(Bar.at_most(promise, after / before, 1.25, "times"))
    return results.finish(options.json)


def _per_phase(calls: dict[int, list[list[_Call]]]) -> Table:
    table = Table(
        "Calls with a path in the run directory, per agent",
        ["nodes", "agent", "start", "change", "end", "per second between"],
        note="strace --seccomp-bpf -f -y -e trace=file. Change: the last agent is killed. Between: for "
        f"{_REST:.0f} s. Start and change include {_SETTLING:.0f} s of that. Others: the most of any of them.",
    )
    for size, agents in calls.items():
        for who, some in (("leads", agents[:1]), ("others", agents[1:])):
            row: list[Cell] = [size, who, *(_most(some, phase) for phase in ("start", "change", "end"))]
            table.rows.append([*row, f"{_most(some, 'rest') / _REST:.1f}"])
    return table


def _per_directory(agents: list[list[_Call]]) -> Table:
    table = Table(
        "What an agent makes, renames and removes in directories that all agents share",
        ["directory", *(f"{who}, {phase}" for who in ("leads", "others") for phase in ("start", "change", "end"))],
        note="Others: the most of any of them. A directory that is an agent's own is not listed.",
    )
    counted = [Counter((call.directory, call.phase) for call in calls if call.changed) for calls in agents]
    for directory in sorted({directory for counter in counted for directory, _ in counter}):
        cells = [
            max(counter[directory, phase] for counter in some)
            for some in (counted[:1], counted[1:])
            for phase in ("start", "change", "end")
        ]
        table.rows.append([directory or ".", *cells])
    return table


def _most(agents: list[list[_Call]], phase: str) -> int:
    return max(sum(call.phase == phase for call in calls) for calls in agents)


def _measure(size: int) -> list[list[_Call]]:
    """The calls of each agent of a run, the one that leads first."""
    with tempfile.TemporaryDirectory(prefix="run-directory-") as place, allocation(Path(place), size) as nodes:
        traces = [Path(place, f"trace.{number}") for number in range(1, size + 1)]
        for number, trace in enumerate(traces, 1):
            _start(nodes, number, trace)
            # The first one leads; others that find nobody to lead them look again every half second.
            eventually((nodes.run_dir / "endpoints" / f"{nodes.job_id}.0.json").exists)
        nodes.seen(0)
        # Where the phases end.
        ends = [time.time() + _SETTLING]
        time.sleep(_SETTLING + _REST)
        ends.append(time.time())
        nodes.agents[-1].kill()
        nodes.seen(1)
        time.sleep(_SETTLING)
        ends.append(time.time())
        if {record["leader"].split("/")[0] for record in nodes.records()} != {nodes.nodes[0]}:
            raise SystemExit("benchmarks.run_directory: another agent came to lead; is the machine busy?")
        nodes.touch("finish")
        for agent in nodes.agents[:-1]:
            agent.wait()
        # The one that was killed has no end, and no change.
        return [_read(trace, nodes, ends) for trace in traces[:-1]]


def _start(nodes: Allocation, number: int, trace: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        raise SystemExit("benchmarks.run_directory: strace is not installed")
    # As a child of its own, so that the process that is killed is the agent.
    traced = [strace, "-D", "-f", "--seccomp-bpf", "-y", "-ttt", "-e", "trace=file", "-o", str(trace)]
    nodes.command(number, *traced, *agent_command(f"--local-addr={nodes.nodes[number - 1]}", str(WORKER)))


def _read(trace: Path, nodes: Allocation, ends: list[float]) -> list[_Call]:
    found, opened = [], set()
    for line in _whole_lines(trace):
        match = re.match(rf'\d+ +([0-9.]+) (\w+)\(.*?{re.escape(str(nodes.run_dir))}([^">]*)[">]', line)
        if match is None:
            continue
        moment, name, path = float(match[1]), match[2], match[3].strip("/")
        changed = name in _CHANGES
        if "O_CREAT" in line:
            changed = path not in opened
            opened.add(path)
        own = not set(nodes.nodes).isdisjoint(path.split("/")[:-1])
        phase = _PHASES[sum(moment > end for end in ends)]
        found.append(_Call(phase, _directory(path), changed and not own and " = -1 " not in line))
    return found


def _whole_lines(trace: Path) -> Iterator[str]:
    """Lines of strace, which splits a call in two where another process calls before it returns."""
    begun: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        process = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            begun[process] = line
        elif " resumed>" in line and process in begun:
            yield begun.pop(process) + line.partition(" resumed>")[2]
        else:
            yield line


def _directory(path: str) -> str:
    """The directory of a path in the run directory, with rounds and incarnations as ``*``."""
    return re.sub(r"(?<=round_)\d+|\d+\.\d+$", "*", path.rpartition("/")[0])


if __name__ == "__main__":
    sys.exit(main())
