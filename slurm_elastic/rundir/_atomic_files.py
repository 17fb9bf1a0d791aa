"""Creating, replacing and reading whole files that other nodes read at the same time.

Only what NFS v3 and v4 and Lustre promise is used: link() and rename() are atomic at the server, and open()
revalidates (nfs(5), "close-to-open cache consistency"). Neither locks nor time stamps are relied upon.
Whoever opens a file by its name finds it whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["append", "claim", "exists", "list_names", "make_directory", "publish", "read", "written"]

_STALE_ATTEMPTS = 5


@contextlib.contextmanager
def written(target: Path, content: bytes, mode: int = 0o666) -> Iterator[Path]:
    """Give a complete, durable file with a unique name beside ``target``; it is removed afterwards."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            # NFS may report a full disk or quota only here, close(2).
            os.close(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def publish(target: Path, content: bytes, mode: int = 0o666) -> None:
    """Put a file in place, replacing one that is there."""
    with written(target, content, mode=mode) as temporary:
        temporary.replace(target)
    _sync_directory(target.parent)


def claim(target: Path, content: bytes, mode: int = 0o666) -> bool:
    """Create a file with its content, exclusively.

    Returns:
        False if the file is there already: somebody else was first.
    """
    with written(target, content, mode) as temporary:
        try:
            target.hardlink_to(temporary)
        except OSError as error:
            # An NFS client that repeats a link() whose answer got lost is told EEXIST; the link count tells
            # the truth then (open(2), on O_EXCL).
            if temporary.stat().st_nlink != 2:
                if error.errno == errno.EEXIST:
                    return False
                raise
    _sync_directory(target.parent)
    return True


def read(path: Path) -> bytes | None:
    """Return a file's content, None if there is none."""
    for attempt in range(_STALE_ATTEMPTS):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if attempt:
                return None
            _forget_absence(path.parent)
        except OSError as error:
            # Another node replaced the file between our look-up and our read.
            if error.errno != errno.ESTALE or attempt == _STALE_ATTEMPTS - 1:
                raise
    return None


def exists(path: Path) -> bool:
    """Return whether there is something by that name."""
    if os.path.lexists(path):
        return True
    _forget_absence(path.parent)
    return os.path.lexists(path)


def list_names(directory: Path) -> list[str]:
    """Return the names in a directory; none if there is no such directory."""
    # Opening a directory revalidates it, see `_forget_absence`; so the list is that of the server.
    if not exists(directory):
        return []
    return [entry.name for entry in directory.iterdir()]


def append(path: Path, line: bytes) -> None:
    """Append a line by a single write.

    O_APPEND is atomic among the processes of one node, but not among the clients of an NFS server (open(2)):
    each node appends to files of its own.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make one directory unless it is there; its parent has to be."""
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            _forget_absence(path.parent)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _forget_absence(directory: Path) -> None:
    """Make an NFS client ask its server again for a name that it believes absent.

    A client caches absence until the directory's attributes expire, up to 60 s (acdirmax, nfs(5)). Opening
    the directory revalidates the attributes.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _sync_directory(directory: Path) -> None:
    """Make a new name durable where the file system can; some refuse to sync a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
