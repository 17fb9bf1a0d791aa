"""Stores the list of a script's imports beside the run directories, for the next run.

A user's lists are used by that user only: the file has to belong to the user, without access for others, and has a
keyed digest (BLAKE2b) under a key in the user's home directory. A list is valid for one script, interpreter, sys.path
and set of installed packages; its name is a digest of all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurm_elastic.agent.forkserver._import_plan import ImportPlan, from_json, to_json

__all__ = [
    "Directories",
    "EVERYTHING",
    "ListError",
    "forget_list",
    "StoredList",
    "list_path",
    "package_directories",
    "read_list",
    "write_list",
]

_KEPT = 90 * 24 * 3600.0
"""Seconds without a write after which a list is removed."""
_LARGEST = 4 << 20
EVERYTHING = "*"
"""The name in `left_out` that stands for all modules: workers have died of learned imports."""

Directories = Mapping[str, int]
"""The time of the last change (st_mtime_ns), by directory."""


class ListError(Exception):
    """A list exists and cannot be trusted. The message is one line: what is wrong; how to mend it."""


class StoredList(NamedTuple):
    """The content of a list."""

    plan: ImportPlan
    seconds: float
    """Duration of the imports."""
    effects: Mapping[str, str]
    """Fingerprints of the script's own files, see `_source_effects.fingerprint`."""
    verified: bool = True
    """True if a process has imported the plan and workers could be forked from it."""


def package_directories(path: Sequence[str]) -> list[str]:
    """Return the entries of `path` that packages are installed in."""
    return [entry for entry in path if os.path.basename(entry) in ("site-packages", "dist-packages")]  # noqa: PTH119


def list_path(directory: str, options: Sequence[str], path: Sequence[str]) -> str:
    """Return the path of a script's list; empty for a function, which the fork server does not know yet.

    Args:
        directory: The directory of the lists.
        options: The words of a worker's command between the interpreter and the script's own arguments.
        path: sys.path before Python puts the script's directory in front.
    """
    if not options or "-c" in options:
        return ""
    script = [os.getcwd(), options[-1]] if "-m" in options else [os.path.abspath(options[-1])]  # noqa: PTH100, PTH109
    packages = []
    for entry in package_directories(path):
        with contextlib.suppress(OSError):
            # Wheels record name and version in the name of this directory (packaging.python.org, recording installs).
            packages.extend(sorted(name for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info"))))  # noqa: PTH208
    subject = [sys.version, sys.executable, sys.prefix, script, [*path], packages]
    digest = hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:32]
    stem = os.path.basename(options[-1]).partition(".")[0]  # noqa: PTH119
    safe = "".join(letter for letter in stem if letter.isascii() and (letter.isalnum() or letter in "_-"))[:40]
    return os.path.join(directory, f"{safe or 'script'}-{digest}.json")  # noqa: PTH118


def read_list(path: str) -> StoredList | None:
    """Read a list; None if there is none.

    Raises:
        ListError: The file belongs to another user, others may write it, or its digest is wrong.
        OSError: The file cannot be read.
    """
    try:
        content = _read_private(path)
    except FileNotFoundError:
        return None
    line, _newline, rest = content.partition(b"\n")
    if not secrets.compare_digest(line, _digest(path, rest, _key()).encode()):
        raise ListError(f"{path} is damaged or was not written by this user; remove it")
    try:
        document = json.loads(rest)
        effects = {str(name): str(value) for name, value in document["effects"].items()}
        return StoredList(from_json(document["plan"]), float(document["seconds"]), effects, document["verified"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ListError(f"{path} was written by another version of slurm_elastic; remove it") from None


def write_list(path: str, stored: StoredList) -> None:
    """Write a list, and remove lists beside it that were not written for 90 days.

    Raises:
        ListError, OSError: The list cannot be written.
    """
    document: dict[str, object] = {
        "plan": to_json(stored.plan),
        "seconds": stored.seconds,
        "effects": dict(stored.effects),
    }
    document["verified"] = stored.verified
    rest = json.dumps(document).encode()
    directory = os.path.dirname(path)  # noqa: PTH120
    _make_private(directory)
    temporary = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123
            file.write(_digest(path, rest, _key()).encode() + b"\n" + rest)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    _remove_old(directory)


def forget_list(path: str, reason: str) -> None:
    """Replace a list by one that lets nothing be learned, as long as script and packages stay the same."""
    with contextlib.suppress(ListError, OSError):
        write_list(path, StoredList(ImportPlan((), {EVERYTHING: reason}), 0.0, {}))


def _remove_old(directory: str) -> None:
    with contextlib.suppress(OSError):
        # Compares a time of the file server with one of this node: the difference is small against 90 days.
        for entry in os.scandir(directory):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _KEPT:
                os.unlink(entry.path)  # noqa: PTH108


def _digest(path: str, content: bytes, key: bytes) -> str:
    # The name is part of the digest: a list that is renamed to that of another script is not valid.
    name = os.path.basename(path).encode()  # noqa: PTH119
    return hashlib.blake2b(name + b"\n" + content, key=key, digest_size=32, person=b"import list").hexdigest()


def _key() -> bytes:
    """Return the user's key; create it if there is none."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    directory = os.path.join(home, "slurm_elastic")  # noqa: PTH118
    path = os.path.join(directory, "imports.key")  # noqa: PTH118
    try:
        key = _read_private(path)
    except FileNotFoundError:
        _make_private(directory)
        temporary = f"{path}.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123
                file.write(secrets.token_bytes(32))
            # Exclusive, also on NFS (open(2), on O_EXCL).
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)  # noqa: PTH108
        key = _read_private(path)
    if len(key) != 32:
        raise ListError(f"{path} is not a key; remove it")
    return key


def _make_private(directory: str) -> None:
    os.makedirs(os.path.dirname(directory), exist_ok=True)  # noqa: PTH103, PTH120
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)  # noqa: PTH102
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ListError(f"{directory} is not a directory that only this user can write to; remove it")


def _read_private(path: str) -> bytes:
    """Return the content of a file that belongs to this user and that no other user may read or write.

    Raises:
        ListError: The file is not of this kind.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ListError(f"{path} cannot be opened: {error.strerror}; remove it") from None
    with open(descriptor, "rb") as file:  # noqa: PTH123
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ListError(f"{path} is not a file of this user's own with mode 0600; remove it")
        return file.read(_LARGEST)
