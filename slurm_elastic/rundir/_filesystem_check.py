"""The check of a file system before it gets a run directory."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import group_may_write, require_own, require_safe_parent
from slurm_elastic.rundir import _atomic_files
from slurm_elastic.rundir._atomic_files import explain

_PROBE_BYTES = 65536
_FIX = "give a run directory of your own by --run-dir"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # link(2)


def make_fit(base: Path, path: Path, subdirectories: Iterable[str]) -> None:
    """Create a run directory with its subdirectories, and check by writing that it works.

    Args:
        base: The existing directory below which the run directory is.
        path: The run directory.
        subdirectories: Names of directories in it.

    Raises:
        UsageError: The base is missing, or the file system is not writable, is full, or has no hard links.
    """
    with _unfit(base):
        # Path.is_dir() is False where this process may not look, since Python 3.14.
        try:
            exists = stat.S_ISDIR(base.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            exists = False
    if not exists:
        raise UsageError(f"{base} is no directory on this node; give a run directory that all nodes share by --run-dir")
    subdirectories = tuple(subdirectories)
    for directory in (path.parent, path, *(path / name for name in subdirectories)):
        with _unfit(directory):
            _atomic_files.make_directory(directory)
    group = group_may_write()
    with _unfit(path):
        owner = _probe(path)
        require_safe_parent(path.parent, (owner,), fix=_FIX, group=group)
        for directory in (path, *(path / name for name in subdirectories)):
            # Never the logs: they are written by names, of which a group could make links to other places.
            require_own(directory, (owner,), fix=_FIX, group=group and directory.name != "logs")


def _probe(path: Path) -> int:
    """Write a file and link it: mode bits do not show read-only mounts, quotas or missing hard links.

    Returns:
        The user id that the file server takes this process for.
    """
    with _atomic_files.written(path / "probe", bytes(_PROBE_BYTES)) as temporary:
        link = temporary.with_name(f"{temporary.name}.link")
        try:
            link.hardlink_to(temporary)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise UsageError(
                f"{path}: the file system has no hard links; give a run directory on another by --run-dir"
            ) from None
        link.unlink()
        return temporary.stat().st_uid


@contextlib.contextmanager
def _unfit(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{explain(path, error)}, or give another run directory by --run-dir") from None
