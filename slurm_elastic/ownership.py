"""Checks that files and directories belong to this user, so that no other one can have put something there; unpickling.

A directory that others may write to lets them put, rename and remove what they like, whatever the modes of the files in
it. With the sticky bit they may only touch what is theirs (inode(7)), as in /tmp.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slurm_elastic.errors import UsageError

NEW_DIRECTORY = 0o755
NEW_FILE = 0o644
"""Modes of what is made: never open to others for writing, whatever the umask, which can take more away."""

_WRITABLE = 0o022


def group_may_write() -> bool:
    """Return True if the user wants its run directories open to their group for writing."""
    return bool(os.environ.get("SLURM_ELASTIC_GROUP_WRITE"))


def require_own(
    path: Path,
    owners: Collection[int] = (),
    *,
    fix: str = "remove it, or take another place",
    group: bool = False,
) -> None:
    """Make sure that a directory belongs to this user, and that no other user may write to it.

    A directory of this user that others may write to, as with an umask of 002, loses that permission.

    Args:
        owners: Further user ids that count as this user's, as a file server with root_squash changes ids (exports(5)).
        fix: The advice at the end of the error.
        group: True if the group of the directory may write to it.

    Raises:
        UsageError: The directory belongs to another user, or stays open to others.
    """
    writable = _writable(group)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (os.geteuid(), *owners):
            raise UsageError(f"{path} belongs to another user (uid {status.st_uid}); {fix}")
        if status.st_mode & writable:
            try:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~writable)
            except OSError as error:
                mode = stat.S_IMODE(status.st_mode)
                raise UsageError(
                    f"{path} is open to others for writing (mode {mode:04o}), and that cannot be changed: "
                    f"{error.strerror}; chmod go-w it, or take a file system that keeps permissions"
                ) from None
    finally:
        os.close(descriptor)


def require_safe_parent(path: Path, owners: Collection[int] = (), *, fix: str, group: bool = False) -> None:
    """Make sure that no other user can replace what this one makes in a directory.

    Others may write to the directory if it has the sticky bit, and it belongs to this user or to root: its owner can
    rename what is in it, whatever its mode.

    Args:
        owners, fix: See `require_own`.
        group: True if the group of the directory counts as this user.

    Raises:
        UsageError: Another user can.
    """
    status = path.stat()
    is_shared = group and status.st_mode & stat.S_IWGRP and status.st_gid in (os.getegid(), *os.getgroups())
    # An own link leads where this user wants; another user can change its own.
    for owner in (path.lstat().st_uid, status.st_uid):
        if owner not in (0, os.geteuid(), *owners) and not is_shared:
            raise UsageError(f"{path} belongs to another user (uid {owner}), who could replace what is in it; {fix}")
    if not status.st_mode & _writable(group) or status.st_mode & stat.S_ISVTX:
        return
    if status.st_uid in (os.geteuid(), *owners):
        require_own(path.resolve(), owners, fix=fix, group=group)
        return
    raise UsageError(
        f"{path} is open to others for writing (mode {stat.S_IMODE(status.st_mode):04o}), who could replace what is in "
        f"it; have it chmod +t, or {fix}"
    )


def _writable(group: bool) -> int:
    return _WRITABLE & ~stat.S_IWGRP if group else _WRITABLE


def is_writable_by_others(path: Path) -> bool:
    """Return True if other users may put, rename and remove what they like in a directory."""
    mode = path.stat().st_mode
    return bool(mode & _WRITABLE) and not mode & stat.S_ISVTX


def open_own(path: Path | str, flags: int, directory: int | None = None) -> int:
    """Open a regular file of this user, and follow no link to it.

    Args:
        directory: A descriptor of its directory; None to look that up.

    Raises:
        PermissionError: The file belongs to another user, or is no regular file.
        OSError: The file cannot be opened, or is a link.
    """
    name = path if directory is None else Path(path).name
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, NEW_FILE, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(1, "not a regular file", str(path))
        owner = (Path(path).parent.stat() if directory is None else os.fstat(directory)).st_uid
        # A file server may give what this user makes to another id; then the directory belongs to that one, too.
        if status.st_uid not in (os.geteuid(), owner):
            raise PermissionError(1, f"belongs to another user (uid {status.st_uid})", str(path))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_own(path: Path | str, *, append: bool = False) -> int:
    """Open a file of this user for writing, as `open_own` does; create it if it is missing, empty it unless `append`.

    Raises:
        OSError: See `open_own`.
    """
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0))
    if not append:
        # Not by O_TRUNC, which would empty another user's file before its owner is known.
        os.ftruncate(descriptor, 0)
    return descriptor


def owner_of_new_files(directory: Path) -> int:
    """Return the user id that new files of this process get in a directory: a file server may change it (exports(5)).

    Raises:
        OSError: This process cannot make a file there.
    """
    path = directory / f".owner.{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        path.unlink()


def open_trusted(path: Path) -> int:
    """Open a file for reading whose content this process may execute.

    File and directory belong to this user, no other one may write to the file, and it is no link. An own directory that
    others may write to, as with an umask of 002, loses that permission.

    Raises:
        PermissionError: Another user can have written the file, or put it there.
        OSError: It cannot be opened, or is a link.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(directory)
        is_own = status.st_uid == os.geteuid()
        with contextlib.suppress(OSError):
            is_own = is_own or status.st_uid == owner_of_new_files(path.parent)
        if not is_own:
            raise PermissionError(1, f"belongs to another user (uid {status.st_uid})", str(path.parent))
        if status.st_mode & _WRITABLE:
            os.fchmod(directory, stat.S_IMODE(status.st_mode) & ~_WRITABLE)
        descriptor = open_own(path, os.O_RDONLY, directory)
    finally:
        os.close(directory)
    if os.fstat(descriptor).st_mode & _WRITABLE:
        os.close(descriptor)
        raise PermissionError(1, "open to others for writing", str(path))
    return descriptor


def unpickle(source: int | Path) -> Any:
    """Return the object whose pickle is in a file. Nothing else of this project unpickles: a pickle can run any code.

    docs/security.md lists who calls it. The fork server (agent/forkserver) has memory files that only its agent makes.

    Args:
        source: A descriptor that was inherited or made here, which is closed; or a path, see `open_trusted`.

    Raises:
        PermissionError: Another user can have written the file.
        OSError: There is none, or it cannot be read.
        Exception: It is no pickle, or names what cannot be imported here.
    """
    # Commands that check owners alone need not wait for it.
    import pickle

    with os.fdopen(source if isinstance(source, int) else open_trusted(source), "rb") as file:
        return pickle.load(file)


def pickled(value: object, name: str) -> bytes:
    """Return the pickle of a function, by its name, and its arguments, by cloudpickle.

    Raises:
        UsageError: One of them cannot be pickled.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UsageError(
            f"{name} or an argument of it cannot be pickled: {error}; create it in the function"
        ) from error
