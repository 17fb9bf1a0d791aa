"""Finds the directory of a run by its id, the beginning of its id, or the id of one of its jobs."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

from slurm_elastic.errors import UsageError, did_you_mean
from slurm_elastic.rundir import RunContents, RunDir, run_ids
from slurm_elastic.text import printable

__all__ = ["find_run", "own_run_dirs"]


def find_run(base: Path, name: str, asks_slurm: Callable[[str], str | None]) -> RunDir:
    """Return the directory of a run.

    Args:
        base: The directory in which sbatch was called.
        name: Id of the run, the beginning of its id, or the id of a job of the run.
        asks_slurm: Returns the directory in which a job was submitted; None if Slurm does not know the job. Called only
            if there is no such run below `base`.

    Raises:
        UsageError: There is no such run, there are several, or the run belongs to another user.
    """
    known = run_ids(base)
    matching = [name] if name in known else [each for each in known if name and each.startswith(name)]
    job = name.partition("_")[0]
    if not matching:
        matching = [each for each in known if RunContents(RunDir.for_run(base, each)).has_job(job)]
    if len(matching) > 1:
        shown = ", ".join(matching[:8]) + (", ..." if len(matching) > 8 else "")
        raise UsageError(f"{len(matching)} runs match {printable(name)!r}: {shown}; give more of the id")
    if matching:
        return _own(RunDir.for_run(base, matching[0]))
    elsewhere = asks_slurm(name) if job.isdigit() else None
    if elsewhere is not None and Path(elsewhere).absolute() != base.absolute():
        return find_run(Path(elsewhere), name, lambda _: None)
    mend = "change to the directory in which sbatch was called, or give --run-dir"
    runs = base.absolute() / "elastic-runs"
    if not os.access(base, os.R_OK | os.X_OK) or (runs.is_dir() and not os.access(runs, os.R_OK | os.X_OK)):
        raise UsageError(f"no permission to look for run {printable(name)} in {runs}; is it the run of another user?")
    if known:
        mend = did_you_mean(name, known, otherwise=f"slurm-elastic list shows those that are there; or {mend}")
    raise UsageError(f"no run {printable(name)} in {runs}; {mend}")


def own_run_dirs(base: Path) -> list[RunDir]:
    """Return the directories of all runs of this user below a directory."""
    found = (RunDir.for_run(base, name) for name in run_ids(base))
    return [run_dir for run_dir in found if _owner(run_dir.path) in (os.geteuid(), None) or os.geteuid() == 0]


def _own(run_dir: RunDir) -> RunDir:
    owner = _owner(run_dir.path)
    if owner not in (os.geteuid(), None) and os.geteuid() != 0:
        raise UsageError(
            f"run {run_dir.run_id} belongs to {_user(owner)}; only that user and root can look at it; ask "
            f"them for the output of slurm-elastic status {run_dir.run_id}"
        )
    return run_dir


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _user(uid: int | None) -> str:
    try:
        return f"user {pwd.getpwuid(uid or 0).pw_name}"
    except KeyError:
        return f"another user (uid {uid})"
