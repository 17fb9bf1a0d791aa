"""The check whether a newer round or term has superseded the group of a worker."""

from __future__ import annotations

from collections.abc import Mapping


def is_superseded(environ: Mapping[str, str]) -> bool:
    """Look in the run directory for a newer round, or a newer term, than that of this worker.

    A leader transfers its leadership when no agent has workers, so no worker of a current group finds a newer term.
    Records whose names the environment does not give are not read.

    Args:
        environ: The worker's environment, with SLURM_ELASTIC_RUN_DIR, _ROUND, _SCOPE, and _TERM or _EPOCH.

    Returns:
        True if the group is superseded; also if the run directory cannot be read, with a warning in the log.
    """
    run_dir, round_ = environ.get("SLURM_ELASTIC_RUN_DIR"), _number(environ, "SLURM_ELASTIC_ROUND")
    if not run_dir or round_ is None:
        return False
    # Imported here: pathlib takes longer than the rest of this package, and only checkpoints need it.
    from pathlib import Path

    from slurm_elastic.rundir import RunDir, RunDirError

    directory = RunDir(Path(run_dir), environ.get("SLURM_ELASTIC_RUN_ID", ""))
    incarnation = environ.get("SLURM_ELASTIC_SCOPE")
    # Agents of earlier releases give the older name only.
    term = _number(environ, "SLURM_ELASTIC_TERM")
    term = _number(environ, "SLURM_ELASTIC_EPOCH") if term is None else term
    try:
        if _newer(directory.last_round(), round_):
            return True
        if not incarnation or term is None:
            return False
        return _newer(directory.newest_epoch(incarnation), term)
    except RunDirError as error:
        import logging

        logging.getLogger("slurm_elastic").warning(
            "no checkpoint is published, because it is unknown whether a newer group of workers trains: %s", error
        )
        return True


def _newer(number: int | None, newest: int) -> bool:
    return number is not None and number > newest


def _number(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ.get(name, ""))
    except ValueError:
        return None
