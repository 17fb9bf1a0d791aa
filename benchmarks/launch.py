"""How long workers of one node need to start and to restart, and what they take up, under torchrun and under ours.

    python -m benchmarks.launch [--json FILE] [--repetitions 5] [--workers 8] [--only barrier,line,restart]
    python -m benchmarks.launch --python PYTHON --python PYTHON [--json FILE] [--repetitions 5] [--workers 8]

`torchrun --standalone` and `slurm-elastic agent` run the same script, in turns. Times are those of the script itself,
from the clock that all processes of a machine share (CLOCK_MONOTONIC), since the launcher started, or since a worker
ended by itself. The package is compiled before, as pip does it with packages that it installs, torch among them.

`--python PYTHON` shows the start with each of several interpreters, whose environments have torch and what the package
needs: one launch of each launcher with each interpreter, in turns.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import sandbox
from benchmarks.options import add_parts, make_parser
from benchmarks.tables import Bar, Results, Table, longest, median, seconds
from benchmarks.usage import usage

_ROOT = Path(__file__).parents[1]
_LIMIT = 90.0
"""Seconds after which a launch counts as never."""

_SCRIPT = """\
import time
first_line = time.monotonic()
import os, sys
directory, plan = sys.argv[1:]
rank = os.environ["RANK"]
again = os.path.exists(os.path.join(directory, "failure"))
def mark(event, moment):
    with open(os.path.join(directory, f"{event}.{rank}.{int(again)}.new"), "w") as file:
        file.write(str(moment))
    os.rename(file.name, file.name[:-4])
mark("line", first_line)
import torch
import torch.distributed
mark("torch", time.monotonic())
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
mark("barrier", time.monotonic())
if plan == "restart" and not again and rank == "0":
    while not os.path.exists(os.path.join(directory, "fail")):
        time.sleep(0.05)
    with open(os.path.join(directory, "failure.new"), "w") as file:
        file.write(str(time.monotonic()))
    os.rename(file.name, os.path.join(directory, "failure"))
    os._exit(1)
time.sleep(1000)
"""

_LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone"],
    "slurm-elastic": ["slurm_elastic", "agent"],
}

_Taken = dict[str, list[float | None]]
"""What was measured, by launcher."""


def main() -> int:
    """Measure, show and judge."""
    options = _options()
    sandbox.enter("benchmarks.launch")
    compileall.compile_dir(_ROOT / "slurm_elastic", quiet=1)
    results = Results.of("launch")
    if options.python:
        _interpreters(results, options.python, options.repetitions, options.workers)
        return results.finish(options.json)
    parts: dict[str, Callable[[Results, int, int], None]] = {"barrier": _barrier, "line": _line, "restart": _restart}
    for name in options.only:
        parts[name](results, options.repetitions, options.workers)
    return results.finish(options.json)


def _options() -> argparse.Namespace:
    parser = make_parser("launch")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of which medians are taken")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="on the node")
    add_parts(parser, "barrier", "line", "restart")
    parser.add_argument("--python", action="append", metavar="PYTHON", help="interpreters to compare")
    options = parser.parse_args()
    if options.python and options.repetitions == 1:
        parser.error("--python needs at least two --repetitions")
    return options


def _interpreters(results: Results, pythons: list[str], repetitions: int, workers: int) -> None:
    """From the launcher's start to the first barrier, with each interpreter."""
    times: dict[str, _Taken] = {python: defaultdict(list) for python in pythons}
    for python in pythons:
        subprocess.run([python, "-m", "compileall", "-q", str(_ROOT / "slurm_elastic")], check=True)
    for repetition in range(repetitions):
        for python in pythons if repetition % 2 else reversed(pythons):
            for name in _LAUNCHERS:
                with _launch(name, workers, "hold", python=python) as launch:
                    times[python][name].append(launch.last("barrier", workers, since=launch.started))
    table = Table(
        f"{workers} workers of one node: start to first gloo barrier with several interpreters",
        ["Python", "torchrun (s)", "slurm-elastic (s)", "times faster", "middle half of pairs"],
        note=f"Medians of {repetitions}; times faster: of the quotients within pairs, and their quartiles.",
    )
    for python in pythons:
        low, middle, high = statistics.quantiles(_quotients(times[python]), n=4)
        medians = [seconds(median(times[python][name])) for name in _LAUNCHERS]
        table.rows.append([python, *medians, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    results.add(table)


def _barrier(results: Results, repetitions: int, workers: int) -> None:
    """From the launcher's start to the first barrier of many workers, and their memory then."""
    times: _Taken = defaultdict(list)
    memory: _Taken = defaultdict(list)
    for name in _in_turns(repetitions):
        with _launch(name, workers, "hold") as launch:
            times[name].append(launch.last("barrier", workers, since=launch.started))
            memory[name].append(launch.memory())
    table = Table(
        f"{workers} workers of one node: start to first gloo barrier, and memory of all processes then",
        ["launcher", "barrier (s)", "longest (s)", "PSS (MiB)"],
        note=f"Medians of {repetitions}.",
    )
    for name in _LAUNCHERS:
        share = median(memory[name])
        table.rows.append(
            [name, seconds(median(times[name])), seconds(longest(times[name])), f"{share:.0f}" if share else "?"]
        )
    results.add(table)
    results.bars.append(Bar.at_least("first barrier 6 times faster than torchrun", _ratio(times), 6))
    part = _ratio(memory)
    results.bars.append(Bar.at_most("memory at most half of torchrun's", 1 / part if part else None, 0.5, "times"))


def _line(results: Results, repetitions: int, _workers: int) -> None:
    """From the launcher's start to the first line of a single worker, and to the line after `import torch`."""
    first: _Taken = defaultdict(list)
    imported: _Taken = defaultdict(list)
    for name in _in_turns(repetitions):
        with _launch(name, 1, "hold") as launch:
            imported[name].append(launch.last("torch", 1, since=launch.started))
            first[name].append(launch.last("line", 1, since=launch.started))
    table = Table(
        "1 worker: start to first line",
        ["launcher", "first line (s)", "torch imported (s)"],
        [[name, seconds(median(first[name])), seconds(median(imported[name]))] for name in _LAUNCHERS],
        note=f"Medians of {repetitions}.",
    )
    results.add(table)
    results.bars.append(Bar.at_least("1 worker: not slower than torchrun to its first line", _ratio(first), 1))


def _restart(results: Results, repetitions: int, workers: int) -> None:
    """From the moment that one worker ends by itself to the first line of all new ones."""
    first: _Taken = defaultdict(list)
    imported: _Taken = defaultdict(list)
    barrier: _Taken = defaultdict(list)
    for name in _in_turns(repetitions):
        with _launch(name, workers, "restart") as launch:
            launch.last("barrier", workers, since=launch.started)
            # Long enough for a launcher that prepares restarts when it has nothing else to do.
            time.sleep(8)
            (launch.directory / "fail").touch()
            failed = launch.moment("failure")
            barrier[name].append(launch.last("barrier", workers, since=failed, again=True))
            imported[name].append(launch.last("torch", workers, since=failed, again=True))
            first[name].append(launch.last("line", workers, since=failed, again=True))
    table = Table(
        f"{workers} workers of one node: restart after one of them ended by itself",
        ["launcher", "first line of all (s)", "torch imported (s)", "barrier (s)"],
        note=f"Until the last of them is there. Medians of {repetitions}.",
    )
    for name in _LAUNCHERS:
        table.rows.append([name, *(seconds(median(taken[name])) for taken in (first, imported, barrier))])
    results.add(table)
    results.bars.append(
        Bar.at_most(f"restart of {workers} workers to their first line in 0.3 s", median(first["slurm-elastic"]), 0.3)
    )


def _in_turns(repetitions: int) -> Iterator[str]:
    for _repetition in range(repetitions):
        yield from _LAUNCHERS


def _quotients(taken: _Taken) -> list[float]:
    """How many times torchrun's time is ours, of each pair."""
    pairs = zip(taken["torchrun"], taken["slurm-elastic"], strict=True)
    return [(torchs or _LIMIT) / (ours or _LIMIT) for torchs, ours in pairs]


def _ratio(taken: _Taken) -> float | None:
    """How many times torchrun's median is ours."""
    torchs, ours = median(taken["torchrun"]), median(taken["slurm-elastic"])
    return torchs / ours if torchs and ours else None


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launcher that runs, and the directory in which its workers write down what they have reached."""

    directory: Path
    process: subprocess.Popen[bytes]
    started: float

    def last(self, event: str, workers: int, *, since: float | None, again: bool = False) -> float | None:
        """Seconds until the last worker reached it; None if one never did."""
        moments = [self.moment(f"{event}.{rank}.{int(again)}") for rank in range(workers)]
        reached = [moment for moment in moments if moment is not None]
        return max(reached) - since if since is not None and len(reached) == workers else None

    def moment(self, event: str) -> float | None:
        """When it happened, once it has."""
        file = self.directory / event
        while not file.exists():
            if time.monotonic() - self.started > _LIMIT or self.process.poll() is not None:
                return None
            time.sleep(0.02)
        return float(file.read_text())

    def memory(self) -> float:
        """Of the launcher and all its descendants, MiB; what they share is counted once."""
        return memory(self.process.pid)


@contextlib.contextmanager
def _launch(name: str, workers: int, plan: str, python: str = sys.executable) -> Iterator[_Launch]:
    with tempfile.TemporaryDirectory(prefix="launch-") as directory:
        script = Path(directory, "train.py")
        script.write_text(_SCRIPT)
        started = time.monotonic()
        command = [python, "-m", *_LAUNCHERS[name], "--nproc-per-node", str(workers), "--max-restarts", "1"]
        process = subprocess.Popen(
            [*command, str(script), directory, plan],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield _Launch(Path(directory), process, started)
        finally:
            end(process)


def memory(pid: int) -> float:
    """Of a process and all its descendants, MiB; what they share is counted once."""
    total = 0.0
    for each in _family(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
            total += usage(each).share
    return total


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its workers: torchrun leaves them when it is killed, so they have to be found before."""
    for pid in _family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


if __name__ == "__main__":
    sys.exit(main())
