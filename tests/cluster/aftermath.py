"""What a person has to see of a test that failed, when all that is left is its output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.testbed import Cluster, TestbedError

_LINES = 60
_MOST = 6000
"""Characters of a description: where only the end of a long output is kept, the assertion has to be in it."""
_SHORT, _WIDTH = 25, 240
_QUEUE = ["squeue", "--all", "--long"]
_COMMANDS = (["sinfo", "-N", "--long"], ["scontrol", "--oneliner", "show", "job"])


def describe(cluster: Cluster, directory: Path | None) -> str:
    """The queue, and of every run below the directory the rounds, the last events and what was printed, in short.

    All that is known, Slurm's logs included, is in a file in the directory, which is kept.
    """
    short = [_shown(cluster, _QUEUE)]
    if directory is not None:
        runs, printed = [*_runs(directory)], [*_printed(directory)]
        (directory / "aftermath.txt").write_text("\n\n".join([*short, *_slurm(cluster), *runs, *printed]))
        short += [*runs, *printed]
    return "\n".join("\n".join(line[:_WIDTH] for line in part.splitlines()[-_SHORT:]) for part in short)[:_MOST]


def _shown(cluster: Cluster, argv: list[str]) -> str:
    try:
        shown = cluster.command(argv, user="root", check=False, timeout=10)
        return _part(" ".join(argv), shown.stdout + shown.stderr)
    except TestbedError as error:
        return _part(" ".join(argv), str(error))


def _slurm(cluster: Cluster) -> Iterator[str]:
    for argv in _COMMANDS:
        yield _shown(cluster, argv)
    for node in cluster.settings.node_names:
        yield _part(f"processes on {node}", "\n".join(f"{each.pid} {each.command}" for each in cluster.processes(node)))
    for log in sorted((cluster.settings.state / "log").glob("slurm*.log")):
        yield _part(log.name, _read(log), _LINES if log.name == "slurmctld.log" else 15)


def _runs(directory: Path) -> Iterator[str]:
    for run in sorted(directory.rglob("elastic-runs/*/")):
        rounds = [json.loads(path.read_text()) for path in sorted(run.glob("rounds/*.json"))]
        yield _part(f"rounds of {run.name}", "\n".join(_round(each) for each in rounds))
        lines = [line for path in run.glob("events/*.jsonl") for line in _read(path).splitlines()]
        yield _part(f"events of {run.name}", "\n".join(sorted(_event(line) for line in lines)))
        for path in sorted(run.glob("logs/*/*/*/std*.log")):
            if text := _read(path):
                yield _part(str(path.relative_to(run)), text, 10)


def _printed(directory: Path) -> Iterator[str]:
    files = {path for pattern in ("*.out", "*.err", "done.json") for path in directory.rglob(pattern)}
    for path in sorted(files):
        yield _part(str(path.relative_to(directory)), _read(path))
    # What the workers of steps.py have written down.
    for path in sorted(directory.glob("steps/*.jsonl")):
        yield _part(str(path.relative_to(directory)), _read(path), 2)


def _round(record: dict[str, Any]) -> str:
    nodes = [place["node"] for place in record["places"]]
    return f"{record['round']}: {nodes} {record['reason']}, {record['restarts']} restarts, led by {record['leader']}"


def _event(line: str) -> str:
    try:
        event = json.loads(line)
        return f"{event['time']} [{event['node']}] {event['event']}: {event['text']}"
    except (ValueError, KeyError):
        return line


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return str(error)


def _part(name: str, text: str, most: int = _LINES) -> str:
    lines = text.splitlines()
    left_out = [f"... {len(lines) - most} lines before"] if len(lines) > most else []
    return "\n".join([f"{name}:", *(f"  {line}" for line in [*left_out, *lines[-most:]])]) if lines else f"{name}: -"
