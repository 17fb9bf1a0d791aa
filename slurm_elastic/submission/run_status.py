"""What the run directory says about a run, for whoever submitted it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.membership import WorkerFailure
from slurm_elastic.rundir import RunDir

__all__ = ["RunView", "latest_log", "look"]

_ROUND = re.compile(r"round_([0-9]+)")


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as it is now.

    Attributes:
        done: whether it is finished.
        world_size: workers of the newest round, None before the first one.
        failure: why it failed; None if it has not, or has been started again since.
    """

    done: bool = False
    world_size: int | None = None
    failure: WorkerFailure | None = None


def look(run_dir: RunDir) -> RunView:
    """Read the run directory. What is not there yet, or cannot be read, is taken as not having happened."""
    with contextlib.suppress(SlurmElasticError):
        newest = _newest_round(run_dir)
        return RunView(
            done=run_dir.is_done(),
            world_size=newest.get("world_size"),
            failure=_failure(run_dir, newest),
        )
    return RunView()


def latest_log(run_dir: RunDir, rank: int, name: str) -> Path | None:
    """Return a log of this rank in the last round that has one; None if there is none.

    Args:
        run_dir: of the run.
        rank: of the worker.
        name: ``stdout.log`` or ``stderr.log``.
    """
    found = [path for path in run_dir.path.glob(f"logs/round_*/*/rank_*/{name}") if _rank(path) == rank]
    return max(found, key=_round, default=None)


def _newest_round(run_dir: RunDir) -> dict[str, Any]:
    number = run_dir.last_round()
    content = None if number is None else run_dir.round_record(number)
    return {} if content is None else msgspec.json.decode(content, type=dict[str, Any])


def _failure(run_dir: RunDir, newest: dict[str, Any]) -> WorkerFailure | None:
    """The failure that belongs to the newest round: an agent's identity is never used twice."""
    agents = {place["agent"] for place in newest.get("places", ())}
    for content in run_dir.failures():
        with contextlib.suppress(msgspec.MsgspecError):
            failure = msgspec.json.decode(content, type=WorkerFailure)
            if failure.agent in agents:
                return failure
    return None


def _rank(log: Path) -> int:
    return int(log.parent.name.removeprefix("rank_"))


def _round(log: Path) -> int:
    match = _ROUND.fullmatch(log.parents[2].name)
    return int(match[1]) if match else -1
