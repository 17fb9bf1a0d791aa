"""The secret of a run, by which its agents authenticate each other and their records."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import _atomic_files

_BYTES = 32
_LINE = re.compile(rb"[0-9a-f]{%d}\n" % (2 * _BYTES))


def load_or_create(path: Path, draw: Callable[[], bytes] = lambda: secrets.token_bytes(_BYTES)) -> bytes:
    """Return the secret in a file. The first process creates it; all processes get the same.

    Args:
        path: The file.
        draw: Makes a new secret.

    Raises:
        UsageError: Other users can read the file, it belongs to another user, or it contains no secret.
        OSError: The file can be neither created nor read.
    """
    if not _atomic_files.exists(path):
        _atomic_files.claim(path, draw().hex().encode() + b"\n", mode=0o600)
    return load(path)


def load(path: Path) -> bytes:
    """Return the secret in a file that exists.

    Raises:
        UsageError: See `load_or_create`.
        OSError: The file cannot be read.
    """
    # Opening another user's file fails without a reason, so the owner is checked before and after opening it.
    _require_private(path, path.lstat())
    descriptor = _atomic_files.patiently(lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, 2 * _BYTES + 2)
    finally:
        os.close(descriptor)
    _require_private(path, status)
    if not _LINE.fullmatch(content):
        raise UsageError(f"{path} is not the secret of a run; remove it while no agent of the run is alive")
    return bytes.fromhex(content.decode())


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is not a regular file; remove it")
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_file(path):
        raise UsageError(f"{path} belongs to another user (uid {status.st_uid}); use a run directory of your own")
    if status.st_mode & 0o077:
        raise UsageError(
            f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it, or take a "
            "run directory on a file system that keeps permissions"
        )


def _owner_of_new_file(path: Path) -> int:
    """Return the user id of new files of this process at the file server; root_squash changes it (exports(5))."""
    with _atomic_files.written(path, b"", mode=0o600) as temporary:
        return temporary.stat().st_uid
