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
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurm_elastic.agent.forkserver._import_plan import ImportPlan, from_json, to_json
from slurm_elastic.agent.forkserver._signed_file import UntrustedFileError, read_signed, write_signed

_LARGEST = 4 << 20
EVERYTHING = "*"
"""The name in `left_out` that stands for all modules: workers have died of learned imports."""

Directories = Mapping[str, int]
"""The time of the last change (st_mtime_ns), by directory."""


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
        UntrustedFileError: The file belongs to another user, others may write it, or its digest is wrong.
        OSError: The file cannot be read.
    """
    content = read_signed(path, _LARGEST)
    if content is None:
        return None
    try:
        document = json.loads(content)
        effects = {str(name): str(value) for name, value in document["effects"].items()}
        return StoredList(from_json(document["plan"]), float(document["seconds"]), effects, document["verified"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedFileError(f"{path} was written by another version of slurm_elastic; remove it") from None


def write_list(path: str, stored: StoredList) -> None:
    """Write a list, and remove lists beside it that were not written for 90 days.

    Raises:
        UntrustedFileError, OSError: The list cannot be written.
    """
    document: dict[str, object] = {
        "plan": to_json(stored.plan),
        "seconds": stored.seconds,
        "effects": dict(stored.effects),
    }
    document["verified"] = stored.verified
    write_signed(path, json.dumps(document).encode())


def forget_list(path: str, reason: str) -> None:
    """Replace a list by one that lets nothing be learned, as long as script and packages stay the same."""
    with contextlib.suppress(UntrustedFileError, OSError):
        write_list(path, StoredList(ImportPlan((), {EVERYTHING: reason}), 0.0, {}))
