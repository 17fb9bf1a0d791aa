"""The list of a script's imports: what all workers of a node have imported, kept beside the run directories.

A user's lists are used by that user only: the file has to belong to the user, without access for others, and has a
keyed digest (BLAKE2b) under a key in the user's home directory. A list is valid for one script, interpreter, sys.path
and set of installed packages; its name is a digest of all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from slurm_elastic.state_directory import state_directory

_LARGEST = 4 << 20
EVERYTHING = "*"
"""The name in `left_out` that stands for all modules: workers have died of learned imports."""
_SETS = rb"environ|putenv|chdir|sys\.path|set_default|seed"
_MATTERS = re.compile(rb".*(?:import|%b).*" % _SETS)
"""Lines of a script that import, or may change what a later import finds."""


@dataclass(frozen=True, slots=True)
class ImportList:
    """The modules that workers are forked with, in the order of first import."""

    modules: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Modules that each worker imports for itself, with the reason for people."""
    seeded: tuple[str, ...] = ()
    """Modules that workers import after a seed was set: these must draw no random numbers."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The script's own files that were imported or executed, and their `fingerprint`."""
    seconds: float = 0.0
    """Duration of the imports."""
    verified: bool = False
    """True if a process has imported it, and workers could be forked from that process."""

    def is_valid(self) -> bool:
        """Return whether the script's files import the same as when the list was written."""
        return all(fingerprint(file) == value for file, value in self.files.items())


def common(records: Sequence[Iterable[str]]) -> tuple[str, ...]:
    """Return what all workers have imported, in the order of the first one."""
    first, *others = records or [()]
    sets = [{*record} for record in others]
    return tuple(name for name in dict.fromkeys(first) if all(name in record for record in sets))


def fingerprint(file: str) -> str:
    """Return a digest of those lines of a script that set what modules find at their import, and of imports before."""
    try:
        with open(file, "rb") as source:  # noqa: PTH123
            lines = _MATTERS.findall(source.read())
    except OSError:
        return ""
    while lines and not re.search(_SETS, lines[-1]):
        lines.pop()
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


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


def read_list(path: str) -> ImportList | None:
    """Read a list; None if there is none.

    Raises:
        UntrustedFileError: The file belongs to another user, others may write it, or its digest is wrong.
        OSError: The file cannot be read.
    """
    content = read_signed(path, _LARGEST)
    if content is None:
        return None
    try:
        return parse_list(content)
    except ValueError:
        raise UntrustedFileError(f"{path} was written by another version of slurm_elastic; remove it") from None


def parse_list(content: bytes) -> ImportList:
    """Parse what `write_list` writes.

    Raises:
        ValueError: The content is no list.
    """
    try:
        document = json.loads(content)
        left_out, files = (
            {str(name): str(value) for name, value in document[part].items()} for part in ("left_out", "files")
        )
        modules, seeded = (tuple(map(str, document[part])) for part in ("modules", "seeded"))
        return ImportList(modules, left_out, seeded, files, float(document["seconds"]), bool(document["verified"]))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no list of imports: {error}") from None


def write_list(path: str, imports: ImportList) -> None:
    """Write a list, and remove lists beside it that were not written for 90 days.

    Raises:
        UntrustedFileError, OSError: The list cannot be written.
    """
    write_signed(path, json.dumps(asdict(imports)).encode())


def forget_list(path: str, reason: str) -> None:
    """Replace a list by one that lets nothing be learned, as long as script and packages stay the same."""
    with contextlib.suppress(UntrustedFileError, OSError):
        write_list(path, ImportList(left_out={EVERYTHING: reason}))


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
