"""Whether a worker belongs to a group that another one has taken the place of."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["is_superseded"]


def is_superseded(environ: Mapping[str, str]) -> bool:
    """Look in the run directory for a newer round, or a newer epoch, than that of this worker.

    A leader that hands over as planned does so when nobody has workers, so no worker of a living group finds a newer
    epoch. What the environment does not tell is not looked at.

    Args:
        environ: with SLURM_ELASTIC_RUN_DIR, _ROUND, _SCOPE and _EPOCH.

    Returns:
        True also if the run directory cannot be read, with a line in the log: then nobody knows.
    """
    run_dir, round_ = environ.get("SLURM_ELASTIC_RUN_DIR"), _number(environ, "SLURM_ELASTIC_ROUND")
    if not run_dir or round_ is None:
        return False
    # Here, as it takes much longer to import than the rest, and is needed once in a checkpoint.
    from pathlib import Path

    from slurm_elastic.rundir import RunDir, RunDirError

    directory = RunDir(Path(run_dir), environ.get("SLURM_ELASTIC_RUN_ID", ""))
    scope, own = environ.get("SLURM_ELASTIC_SCOPE"), _number(environ, "SLURM_ELASTIC_EPOCH")
    try:
        if _newer(directory.last_round(), round_):
            return True
        if not scope or own is None:
            return False
        return _newer(directory.newest_epoch(scope), own)
    except RunDirError as error:
        import logging

        logging.getLogger("slurm_elastic").warning(
            "no checkpoint is published by a group that may be a former one: %s", error
        )
        return True


def _newer(found: int | None, known: int) -> bool:
    return found is not None and found > known


def _number(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ.get(name, ""))
    except ValueError:
        return None
