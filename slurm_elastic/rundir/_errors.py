"""What can go wrong with a run directory."""

from __future__ import annotations

import errno
from pathlib import Path

from slurm_elastic.errors import SlurmElasticError

__all__ = ["RecordError", "RunDirError", "explain"]


class RunDirError(SlurmElasticError):
    """The run directory worked once and does not now: full, read-only, gone.

    The message names the file and the mend.
    """


class RecordError(RunDirError):
    """A record is not one complete JSON object: truncated, or written by something else."""


_CAUSES = {
    errno.EACCES: "no permission for this user; mend its permissions",
    errno.EPERM: "no permission for this user; mend its permissions",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "the file system is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.ENOTDIR: "a file is in the way of a directory; move it",
    errno.ENOENT: "gone, or its directory is; do not remove it while the run lives",
}


def explain(path: Path, error: OSError) -> str:
    """Return one line that says what is wrong with a path."""
    return f"{path}: {_CAUSES.get(error.errno or 0) or error.strerror or error}"
