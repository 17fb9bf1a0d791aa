"""Errors of a run directory."""

from __future__ import annotations

import errno
from pathlib import Path

from slurm_elastic.errors import SlurmElasticError


class RunDirError(SlurmElasticError):
    """The run directory has worked before and fails now: it is full, read-only or gone.

    The message names the file and says how to fix it.
    """


class RecordError(RunDirError):
    """A record is not one complete JSON object: it is truncated, or another program has written it."""


_CAUSES = {
    errno.EACCES: "no permission for this user; fix its permissions",
    errno.EPERM: "no permission for this user; fix its permissions",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "the file system is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.ENOTDIR: "a file has the name of a directory; move the file",
    errno.ENOENT: "it or its directory is gone; do not remove it while the run is alive",
}


def explain(path: Path, error: OSError) -> str:
    """Return a line that says what is wrong with a path and how to fix it."""
    return f"{path}: {_CAUSES.get(error.errno or 0) or error.strerror or error}"
