"""Keeps what is submitted in the executor's folder: a function's pickle, or a script's name."""

from __future__ import annotations

import os
from pathlib import Path

from submitit.core import core, utils

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.checkpointing import SIGNAL, is_checkpointable
from slurm_elastic.submission.entry import WORKER_MODULE, Script
from slurm_elastic.submission.importable import require_importable
from slurm_elastic.submission.job import script_file

__all__ = ["Stored", "writable_folder"]


def writable_folder(folder: Path) -> Path:
    """Make the part of the folder's path that no job id belongs to, and return it.

    Raises:
        UsageError: it cannot be made or written to.
    """
    base = Path(utils.JobPaths.get_first_id_independent_folder(folder))
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {base} cannot be made: {error.strerror}; give one that you can write to") from None
    if not os.access(base, os.W_OK | os.X_OK):
        raise UsageError(f"folder {base} cannot be written to by this user; give another, on a disk that nodes share")
    return base


class Stored:
    """One submission on disk, under a first name until the job has its id.

    Args:
        delayed: the call.
        folder: of the executor.
        uid: makes the first name unique.
        most_gb: of a pickle.

    Raises:
        UsageError: the function or its arguments cannot be pickled, or are too large; or the script is not there.
    """

    def __init__(self, delayed: utils.DelayedSubmission, folder: Path, uid: str, most_gb: float) -> None:
        base = writable_folder(folder)
        self.agent: tuple[str, ...] = ()
        """Options of the agents that go with it."""
        if isinstance(delayed.function, Script):
            delayed.function.require_there()
            self.entry = delayed.function.words()
            """What the workers run."""
            self._file, self._is_script = base / f"{uid}.json", True
            delayed.function.write(self._file)
        else:
            self.entry = ("-m", WORKER_MODULE, str(folder), uid)
            self._file, self._is_script = base / f"{uid}.pkl", False
            require_importable(delayed.function)
            if is_checkpointable(delayed.function):
                self.agent = (f"--worker-signal={SIGNAL.name}",)
            _dump(delayed, self._file, most_gb)

    def keep_for(self, job: core.Job[object]) -> None:
        """Give it the name that belongs to the job."""
        paths = job.paths
        paths.folder.mkdir(parents=True, exist_ok=True)
        self._file.rename(script_file(paths) if self._is_script else paths.submitted_pickle)

    def discard(self) -> None:
        """Remove it."""
        self._file.unlink(missing_ok=True)


def _dump(delayed: utils.DelayedSubmission, path: Path, most_gb: float) -> None:
    try:
        delayed.dump(path)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}; give another folder") from None
    except Exception as error:
        path.unlink(missing_ok=True)
        name = getattr(delayed.function, "__qualname__", repr(delayed.function))
        raise UsageError(
            f"{name} or an argument of it cannot be pickled: {error}; make what it names inside of the function"
        ) from error
    size = path.stat().st_size / 2**30
    if size > most_gb:
        path.unlink()
        raise UsageError(
            f"function and arguments are {size:.2f} GB of pickle; load the data in the function, or raise "
            f"max_pickle_size_gb, which is {most_gb:g}"
        )
