"""The list of a script's imports: what all workers of a node have imported, kept beside the run directories.

A user's lists are used by that user only: no other one may have written the file (`ownership.open_trusted`). A list is
valid for one script, interpreter, sys.path and set of installed packages; its name is a digest of all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import open_trusted, require_own

_LARGEST = 4 << 20
"""Bytes that are read at most; a larger file counts as damaged."""
_KEPT = 90 * 24 * 3600.0
"""Seconds without a write after which a list is removed."""
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

    def with_those_of(self, other: ImportList) -> ImportList:
        """Return this list with what another one adds; what one of them leaves out is left out."""
        left_out = {**self.left_out, **other.left_out}
        modules, seeded = (dict.fromkeys(names) for names in (self.modules + other.modules, self.seeded + other.seeded))
        kept = tuple(name for name in modules if name not in left_out)
        return ImportList(kept, left_out, tuple(seeded), {**self.files, **other.files})

    def is_valid(self) -> bool:
        """Return whether the script's files import the same as when the list was written."""
        return all(fingerprint(file) == value for file, value in self.files.items())


def common(records: Sequence[Iterable[str]]) -> tuple[str, ...]:
    """Return what all workers have imported, in the order of the first one."""
    first, *others = records or [()]
    sets = [{*record} for record in others]
    return tuple(name for name in dict.fromkeys(first) if all(name in record for record in sets))


def fingerprint(path: str) -> str:
    """Return a digest of those lines of a script that set what modules find at their import, and of imports before.

    Of a directory of packages, return when it was changed.
    """
    try:
        if os.path.isdir(path):  # noqa: PTH112
            return str(os.stat(path).st_mtime_ns)  # noqa: PTH116
        with open(path, "rb") as source:  # noqa: PTH123
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

    `options` are the words of a worker's command between the interpreter and the script's own arguments, `path` is
    sys.path before Python puts the script's directory in front.
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
    return os.path.join(directory, f"{digest}.json")  # noqa: PTH118


def read_list(path: str) -> ImportList | None:
    """Read a list; None if there is none.

    Raises UsageError if another user may have written the file or it is damaged, and OSError.
    """
    try:
        with open(open_trusted(Path(path)), "rb") as file:  # noqa: PTH123
            return parse_list(file.read(_LARGEST))
    except FileNotFoundError:
        return None
    except PermissionError:
        raise UsageError(f"{path} is not a file of this user's own with mode 0600; remove it") from None
    except ValueError:
        raise UsageError(f"{path} is damaged or was not written by this user; remove it") from None


def parse_list(content: bytes) -> ImportList:
    """Parse what `write_list` writes; raises ValueError."""
    try:
        document = json.loads(content)
        left_out, files = (dict(document[part]) for part in ("left_out", "files"))
        return ImportList(tuple(document["modules"]), left_out, tuple(document["seeded"]), files)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no list of imports: {error}") from None


def write_list(path: str, imports: ImportList) -> None:
    """Write a list, and remove lists beside it that were not written for 90 days.

    Raises UsageError if the directory belongs to another user, and OSError.
    """
    file = Path(path)
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    require_own(file.parent)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as content:  # noqa: PTH123
        json.dump(asdict(imports), content)
    temporary.replace(file)
    with contextlib.suppress(OSError):
        # Compares a time of the file server with one of this node: the difference is small against 90 days.
        for entry in file.parent.iterdir():
            if time.time() - entry.lstat().st_mtime > _KEPT:
                entry.unlink()


def forget_list(path: str, reason: str) -> None:
    """Replace a list by one that lets nothing be learned, as long as script and packages stay the same."""
    with contextlib.suppress(UsageError, OSError):
        write_list(path, ImportList(left_out={EVERYTHING: reason}))
