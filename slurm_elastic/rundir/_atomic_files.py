"""Files of a run directory: names, errors, and creation, replacement and reading while other nodes read the same."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from slurm_elastic.errors import RecordsError, UsageError
from slurm_elastic.ownership import NEW_DIRECTORY, NEW_FILE, group_may_write, open_own, write_own


class RunDirError(RecordsError):
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


_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_safe(name: str) -> bool:
    """Return True if a name is a safe file name."""
    return _SAFE_NAME.fullmatch(name) is not None


def safe(kind: str, name: str) -> str:
    """Return a name unchanged if it is a safe file name.

    Raises:
        UsageError: The name is no safe file name.
    """
    if not is_safe(name):
        raise UsageError(
            f"{kind} {name[:140]!r} is no safe file name; use at most 128 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit"
        )
    return name


def numbered(number: int) -> str:
    """Return a number as it is in file names, in whose order they are then."""
    if number < 0:
        raise ValueError(f"numbers start at 0: {number}")
    return f"{number:06d}"


# These rely only on guarantees of NFS v3 and v4 and of Lustre: link() and rename() are atomic at the server, and open()
# revalidates (nfs(5), "close-to-open cache consistency"). A process that opens a file by its name finds it complete.
_T = TypeVar("_T")

_STALE_ATTEMPTS = 5
_MOST_BYTES = 256 << 20
"""The largest file that is read whole. The record of a round of 10,000 nodes has 3 MB, events of a long run more."""
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between attempts to open a file while there are no descriptors."""


@contextlib.contextmanager
def written(target: Path, content: bytes, mode: int = NEW_FILE) -> Iterator[Path]:
    """Write a complete, durable file with a unique name beside ``target``, and remove it after the with block."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    descriptor = patiently(lambda: os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        # NFS may report a full disk or quota only when the file is closed, close(2).
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def publish_file(target: Path, content: bytes) -> None:
    """Create or replace a file."""
    with written(target, content) as temporary:
        temporary.replace(target)
    sync_directory(target.parent)


def claim_file(target: Path, content: bytes, mode: int = NEW_FILE) -> bool:
    """Create a file with its content, exclusively.

    Returns:
        False if the file exists already: another process was first.
    """
    with written(target, content, mode) as temporary:
        try:
            target.hardlink_to(temporary)
        except OSError as error:
            # An NFS client that repeats a link() whose answer got lost gets EEXIST; then the link count is right
            # (open(2), on O_EXCL).
            if temporary.stat().st_nlink != 2:
                if error.errno == errno.EEXIST:
                    return False
                raise
    sync_directory(target.parent)
    return True


def read_file(path: Path) -> bytes | None:
    """Return the content of a file; None if there is no such file."""
    for attempt in range(_STALE_ATTEMPTS):
        try:
            with os.fdopen(patiently(lambda: open_own(path, os.O_RDONLY)), "rb") as file:
                content = file.read(_MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    raise OSError(errno.EFBIG, "larger than any file of a run; remove it", str(path))
                return content
        except FileNotFoundError:
            if attempt:
                return None
            _forget_absence(path.parent)
        except OSError as error:
            # Another node replaced the file between look-up and read.
            if error.errno != errno.ESTALE or attempt == _STALE_ATTEMPTS - 1:
                raise
    return None


def exists(path: Path) -> bool:
    """Return True if a file of any kind has that name."""
    if os.path.lexists(path):
        return True
    _forget_absence(path.parent)
    return os.path.lexists(path)


def list_names(directory: Path) -> list[str]:
    """Return the names in a directory; empty if there is no such directory."""
    # `exists` opens the directory, which revalidates it (see `_forget_absence`); so the list is that of the server.
    if not exists(directory):
        return []
    return [entry.name for entry in patiently(lambda: list(directory.iterdir()))]


def append(path: Path, line: bytes) -> None:
    """Append a line by a single write.

    O_APPEND is atomic among the processes of one node, but not among the clients of an NFS server (open(2)):
    each node appends to files of its own.
    """
    descriptor = patiently(lambda: write_own(path, append=True))
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory unless it exists; its parent has to exist."""
    try:
        path.mkdir(NEW_DIRECTORY)
        if group_may_write():
            path.chmod(NEW_DIRECTORY | stat.S_IWGRP)
    except FileExistsError:
        if not path.is_dir():
            _forget_absence(path.parent)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def patiently(open_: Callable[[], _T]) -> _T:
    """Open a file or list a directory; where this process or the node has no descriptor left, wait for one for a while.

    A record that is not written ends the run, and descriptors come back within moments: those of connections that are
    given up, and of files that others close.
    """
    for pause in _PAUSES:
        try:
            return open_()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        time.sleep(pause)
    return open_()


def _forget_absence(directory: Path) -> None:
    """Make an NFS client ask its server again for a name that it has cached as absent.

    A client caches absence until the attributes of the directory expire, up to 60 s (acdirmax, nfs(5)). Opening the
    directory revalidates the attributes.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def sync_directory(directory: Path) -> None:
    """Make a new name durable, unless the file system refuses to sync a directory."""
    with contextlib.suppress(OSError):
        descriptor = patiently(lambda: os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
