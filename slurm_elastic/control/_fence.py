"""The fence of a worker, by which a newer round or term supersedes its group, and its handling of Slurm's signals."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from types import FrameType


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


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def shield() -> bool:
    """Make the signals with which Slurm announces an end have no effect on this process.

    Their default action ends the process. With ProctrackType=proctrack/linuxproc Slurm sends them to all processes of a
    step, and a worker would end before it can save; the agent gets them, too. A handler of the script stays in place.

    Returns:
        True if SIGTERM has no effect now. Then the agent uses SIGKILL where it would use SIGTERM.
    """
    # Only the main thread can set handlers; signal.signal raises ValueError in others.
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                # Not SIG_IGN: programs that the script starts would inherit it (execve(2)).
                signal.signal(number, _leave_to_agent)
                signal.siginterrupt(number, False)
    return signal.getsignal(signal.SIGTERM) is _leave_to_agent


def unshield() -> None:
    """Restore the default action, in a process that is no worker, such as one of a data loader."""
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            if signal.getsignal(number) is _leave_to_agent:
                signal.signal(number, signal.SIG_DFL)


def _leave_to_agent(number: int, frame: FrameType | None) -> None:
    pass
