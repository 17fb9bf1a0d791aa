"""Finds the directory of a run by its path, by its id, the beginning of its id, or the id of one of its jobs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from slurm_elastic.errors import UsageError, did_you_mean
from slurm_elastic.rundir import RUNS, RunContents, RunDir, RunDirError, known_directories, run_ids, run_start
from slurm_elastic.text import printable

_MOST_SHOWN = 8


def find_run(
    run_dir: Path | None, name: str, queued: Callable[[str], Path | None] = lambda _: None, *, exact: bool = False
) -> RunDir:
    """Return the directory of a run.

    Args:
        run_dir: The directory below which it is; None for the current one, or for another one in which a job was
            submitted if there is no such run here.
        name: Path of the run directory; or id of the run, the beginning of its id, or the id of a job of the run.
        queued: Returns the directory in which a job in Slurm's queue was submitted; its run may not have begun.
        exact: True if the beginning of an id is not enough.

    Raises:
        UsageError: There is no such run, there are several, or the run belongs to another user.
    """
    words, (base, name) = name, base_and_id(run_dir or Path.cwd(), name)
    names = run_ids(base)
    matching = [RunDir.for_run(base, match) for match in _matching(name, names) or _with_job(base, name, names)]
    if not matching and not exact:
        matching = [RunDir.for_run(base, candidate) for candidate in names if name and candidate.startswith(name)]
    submitted = queued(name) if not matching and name == words else None
    if not matching and name == words and run_dir is None:
        others = dict.fromkeys(other.absolute() for other in (submitted, *known_directories()) if other is not None)
        matching = [RunDir.for_run(other, match) for other in others for match in _matching(name, run_ids(other))]
    if len(matching) > 1:
        shown = ", ".join(_described(run_dir, matching) for run_dir in matching[:_MOST_SHOWN])
        more = ", ..." if len(matching) > _MOST_SHOWN else ""
        raise UsageError(f"{len(matching)} runs match {printable(name)!r}: {shown}{more}; give more of the id")
    if matching:
        return _own(matching[0])
    if submitted is not None:
        return RunDir.for_run(run_dir or submitted, name)
    fix = "change to the directory in which sbatch was called, or give --run-dir"
    runs = base.absolute() / RUNS
    if not os.access(base, os.R_OK | os.X_OK) or (runs.is_dir() and not os.access(runs, os.R_OK | os.X_OK)):
        raise UsageError(f"no permission to look for run {printable(name)} in {runs}; is it the run of another user?")
    if names:
        fix = did_you_mean(name, names, otherwise=f"slurm-elastic list shows those that are there; or {fix}")
    raise UsageError(f"no run {printable(name)} in {runs}; {fix}")


def base_and_id(base: Path, name: str) -> tuple[Path, str]:
    """Return the directory below which the runs are, and the id of one that is named by its id or by a path."""
    path = Path(name).absolute()
    return (path.parents[1], path.name) if "/" in name and path.parent.name == RUNS else (base, name)


def _matching(name: str, names: list[str]) -> list[str]:
    """Return the run with this id, or the runs of steps and elements of the job or array with this id."""
    if re.fullmatch(r"[0-9]+(_[0-9]+)?\.0", name):
        # The number of the first step is left out.
        return [candidate for candidate in names if candidate == name.removesuffix(".0")]
    of_job = re.compile(rf"{re.escape(name)}(_[0-9]+)?(\.[0-9]+)?")
    return [
        candidate for candidate in names if candidate == name or (name[:1].isdigit() and of_job.fullmatch(candidate))
    ]


def _with_job(base: Path, name: str, names: list[str]) -> list[str]:
    job = name.partition("_")[0]
    return [
        candidate for candidate in names if job.isdigit() and job in RunContents(RunDir.for_run(base, candidate)).jobs()
    ]


def _described(run_dir: RunDir, others: list[RunDir]) -> str:
    """Return a name for the run that no other one has, and what it runs."""
    name = run_dir.run_id
    if any(other.path.parent != run_dir.path.parent for other in others):
        name = str(run_dir.path)
    elif any(other.run_id.startswith(f"{name}.") for other in others):
        name = f"{name}.0"
    try:
        start = run_start(run_dir)
    except RunDirError:
        start = None
    return f"{name} ({printable(shlex.join(start.command))})" if start is not None else name


def own_run_dirs(base: Path) -> list[RunDir]:
    """Return the directories of all runs of this user below a directory."""
    return [run_dir for name in run_ids(base) if _is_own(run_dir := RunDir.for_run(base, name))]


def newest_runs(base: Path) -> list[RunDir]:
    """Return the directories of the runs of this user below a directory, first that which has begun or ended last."""
    times = {run_dir: status.st_mtime for run_dir in own_run_dirs(base) if (status := _status(run_dir)) is not None}
    return sorted(times, key=lambda run_dir: times[run_dir], reverse=True)


def newest_run(base: Path) -> RunDir:
    """Return the first of `newest_runs`; raises UsageError if there is none."""
    run_dirs = newest_runs(base)
    if not run_dirs:
        raise UsageError(
            f"no runs in {base.absolute() / RUNS}; change to the directory in which sbatch was called, or name a run"
        )
    return run_dirs[0]


def _own(run_dir: RunDir) -> RunDir:
    if _is_own(run_dir):
        return run_dir
    try:
        user = f"user {run_dir.path.owner()}"
    except (KeyError, OSError):
        user = "another user"
    raise UsageError(
        f"run {run_dir.run_id} belongs to {user}; only that user and root can look at it; ask them for the output of "
        f"slurm-elastic status {run_dir.run_id}"
    )


def _is_own(run_dir: RunDir) -> bool:
    status = _status(run_dir)
    return status is None or os.geteuid() in (0, status.st_uid)


def _status(run_dir: RunDir) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return run_dir.path.stat()
    return None
