"""The directories in which this user has runs, so that commands find a run by its id from anywhere.

One file for each directory, in the user's state directory. Agents add to them; what cannot be written or read is left
out, as a run does not need it.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from slurm_elastic.rundir import _atomic_files
from slurm_elastic.state_directory import state_directory


def remember_directory(base: Path) -> None:
    """Add a directory below which runs are."""
    path = str(base.absolute())
    with contextlib.suppress(OSError, UnicodeError):
        directory = Path(state_directory()) / "runs"
        file = directory / hashlib.sha256(path.encode()).hexdigest()[:32]
        if not file.exists():
            directory.mkdir(0o700, parents=True, exist_ok=True)
            _atomic_files.publish(file, path.encode())


def known_directories() -> list[Path]:
    """Return all directories that were added, in the order of their names."""
    paths = []
    with contextlib.suppress(OSError):
        directory = Path(state_directory()) / "runs"
        for name in _atomic_files.list_names(directory):
            with contextlib.suppress(OSError, UnicodeError):
                paths.append(Path((_atomic_files.read(directory / name) or b"").decode()))
    return sorted(path for path in paths if path.is_absolute())
