"""Files that only this user may write to, with a keyed digest (BLAKE2b) under a key in the user's home directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time

from slurm_elastic.state_directory import state_directory

_KEPT = 90 * 24 * 3600.0
"""Seconds without a write after which a file is removed."""

_KEY_SIZE = 32
"""Bytes."""


class UntrustedFileError(Exception):
    """A file exists and cannot be trusted. The message is one line: what is wrong; how to fix it."""


def read_signed(path: str, largest: int) -> bytes | None:
    """Return what `write_signed` has written; None if there is no file.

    Args:
        path: The file.
        largest: The bytes that are read at most; a larger file counts as damaged.

    Raises:
        UntrustedFileError: The file belongs to another user, others may write it, or its digest is wrong.
        OSError: The file cannot be read.
    """
    try:
        content = _read_private(path, largest)
    except FileNotFoundError:
        return None
    line, _newline, rest = content.partition(b"\n")
    if not secrets.compare_digest(line, _digest(path, rest, _key()).encode()):
        raise UntrustedFileError(f"{path} is damaged or was not written by this user; remove it")
    return rest


def write_signed(path: str, content: bytes) -> None:
    """Write a file, and remove those beside it that were not written for 90 days.

    Raises:
        UntrustedFileError, OSError: The file cannot be written.
    """
    directory = os.path.dirname(path)  # noqa: PTH120
    _make_private(directory)
    temporary = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123
            file.write(_digest(path, content, _key()).encode() + b"\n" + content)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    _remove_old(directory)


def _remove_old(directory: str) -> None:
    with contextlib.suppress(OSError):
        # Compares a time of the file server with one of this node: the difference is small against 90 days.
        for entry in os.scandir(directory):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _KEPT:
                os.unlink(entry.path)  # noqa: PTH108


def _digest(path: str, content: bytes, key: bytes) -> str:
    # The name is part of the digest: a file that is renamed to another one is not valid.
    name = os.path.basename(path).encode()  # noqa: PTH119
    return hashlib.blake2b(name + b"\n" + content, key=key, digest_size=32, person=b"import list").hexdigest()


def _key() -> bytes:
    """Return the user's key; create it if there is none."""
    directory = state_directory()
    path = os.path.join(directory, "imports.key")  # noqa: PTH118
    try:
        key = _read_private(path, _KEY_SIZE)
    except FileNotFoundError:
        _make_private(directory)
        temporary = f"{path}.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123
                file.write(secrets.token_bytes(_KEY_SIZE))
            # Exclusive, also on NFS (open(2), on O_EXCL).
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)  # noqa: PTH108
        key = _read_private(path, _KEY_SIZE)
    if len(key) != _KEY_SIZE:
        raise UntrustedFileError(f"{path} is not a key; remove it")
    return key


def _make_private(directory: str) -> None:
    os.makedirs(os.path.dirname(directory), exist_ok=True)  # noqa: PTH103, PTH120
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)  # noqa: PTH102
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UntrustedFileError(f"{directory} is not a directory that only this user can write to; remove it")


def _read_private(path: str, largest: int) -> bytes:
    """Return the content of a file that belongs to this user and that no other user may read or write.

    Raises:
        UntrustedFileError: The file is not of this kind.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedFileError(f"{path} cannot be opened: {error.strerror}; remove it") from None
    with open(descriptor, "rb") as file:  # noqa: PTH123
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UntrustedFileError(f"{path} is not a file of this user's own with mode 0600; remove it")
        return file.read(largest)
