"""The events and the progress of a run, as its run directory has them, for functions that judge them."""

from __future__ import annotations

from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.rundir import RunContents, RunDir, RunFile
from slurm_elastic.text import parse_time


def read_events(run_dir: RunDir) -> list[tuple[float, dict[str, Any]]]:
    """Return the events of all starts of the run, each with its time in seconds since 1970."""
    return _read(RunContents(run_dir).events())


def read_history(run_dir: RunDir) -> list[tuple[float, dict[str, Any]]]:
    """Return the events and the progress of all starts of the run, each with its time in seconds since 1970."""
    contents = RunContents(run_dir)
    return _read([*contents.events(), *contents.progress()])


def _read(files: list[RunFile]) -> list[tuple[float, dict[str, Any]]]:
    return [
        (when, event)
        for file in files
        for line in file.content.splitlines()
        if (event := _event(line)) is not None and (when := parse_time(event.get("time"))) is not None
    ]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = typed_json.loads(line)
    except ValueError:
        # The agent was killed while it wrote this line.
        return None
    return event if isinstance(event, dict) else None
