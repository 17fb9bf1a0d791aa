"""The state of a run, from what Slurm's accounting says of its jobs and from its run directory.

State names: sacct(1), "JOB STATE CODES", 22.05 to 26.05.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.observe.views import RUNS, WAITS
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.rundir import RunContents, RunDir

_GOES_ON = WAITS | RUNS | {"PREEMPTED", "READY", "RESV_DEL_HOLD", "UNKNOWN"}
"""submitit's own list (submitit/core/core.py, InfoWatcher.is_done, 1.5.4) lacks RESIZING, in which a job is recorded
that goes on without a lost node, and SUSPENDED."""

_BY_RELEVANCE = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "NODE_FAIL", "DEADLINE", "TIMEOUT", "CANCELLED")
"""Final states, from the one that explains the end of a run best to the one that explains it least."""


def is_final(state: str) -> bool:
    """Return True if a job in this state has ended for good."""
    return _base(state) not in _GOES_ON


def state_of_array(states: Iterable[str]) -> str:
    """Return the state of a run, given the states of the elements of its array."""
    bases = [_base(state) for state in states]
    if any(state in _GOES_ON and state != "PENDING" for state in bases):
        return "RUNNING"
    if "PENDING" in bases:
        return "PENDING"
    if "COMPLETED" in bases:
        # An agent exits with 0 only when the run is finished.
        return "COMPLETED"
    return next((state for state in _BY_RELEVANCE if state in bases), bases[0] if bases else "UNKNOWN")


def _base(state: str) -> str:
    """Return CANCELLED for ``CANCELLED by 1000``."""
    return (state.split() or ["UNKNOWN"])[0].upper()


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The present status of a run.

    Attributes:
        world_size: Number of workers in the newest round; None before the first round.
        failure: The failure that ended the run; None if it did not fail, or has been started again since.
    """

    done: bool = False
    world_size: int | None = None
    failure: WorkerFailure | None = None


def read_status(run_dir: RunDir) -> RunStatus:
    """Read the run directory. A record that is missing or cannot be read counts as not written."""
    with contextlib.suppress(SlurmElasticError):
        number = run_dir.newest("rounds")
        newest = {} if number is None else run_dir.read_record("rounds", number) or {}
        return RunStatus(
            done=run_dir.is_done(),
            world_size=newest.get("world_size"),
            failure=_failure(run_dir, newest),
        )
    return RunStatus()


def latest_log(run_dir: RunDir, rank: int, stream: str) -> Path | None:
    """Return the path of a rank's ``stdout`` or ``stderr`` in the last round that has one; None if no round has."""
    contents = RunContents(run_dir)
    for number in reversed(contents.log_rounds()):
        for log in contents.logs(number):
            if (log.rank, log.stream) == (rank, stream):
                return log.path
    return None


def _failure(run_dir: RunDir, newest: dict[str, Any]) -> WorkerFailure | None:
    """Return the failure of the newest round's incarnation: no agent identity is used twice."""
    agents = {place["agent"] for place in newest.get("places", ())}
    for incarnation in run_dir.keys("failures"):
        with contextlib.suppress(typed_json.JSONError):
            failure = typed_json.convert(run_dir.read_record("failures", incarnation), WorkerFailure)
            if failure.agent in agents:
                return failure
    return None
