"""Files that are changed in place: a process that is killed meanwhile leaves half of the new content."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = 65536
_MOST = 256
"""Files that are watched."""


@dataclass(frozen=True, slots=True)
class _Seen:
    descriptor: int
    size: int
    head: int


class WatchedFiles:
    """Files that were complete at one moment, and are looked at again later.

    The files stay open, so that no other file gets their inodes: one that was replaced by renaming another over it has
    kept its content, and one that was changed in place has not. A file that only grew, such as a log, is none of them.

    Args:
        roots: Directories in which the script may write.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._seen: dict[Path, _Seen] = {}
        self._changed: set[Path] = set()

    def look(self, *, complete: bool) -> None:
        """Look at all files.

        Args:
            complete: True if no worker writes now; then files that are new are watched from now on.
        """
        for path, seen in list(self._seen.items()):
            size = os.fstat(seen.descriptor).st_size
            if size < seen.size or _head(seen.descriptor, seen.size) != seen.head:
                self._changed.add(path)
        if complete:
            self.close()
            for path in self._files():
                with contextlib.suppress(OSError):
                    self._seen[path] = _open(path)

    def overwritten(self) -> tuple[str, ...]:
        """Return the files that were changed in place so far."""
        return tuple(sorted(str(path) for path in self._changed))

    def close(self) -> None:
        """Close the files."""
        for seen in self._seen.values():
            os.close(seen.descriptor)
        self._seen.clear()

    def _files(self) -> Iterator[Path]:
        count = 0
        for root in self._roots:
            for directory, _, files in os.walk(root):
                for name in files:
                    path = Path(directory, name)
                    if not path.is_symlink() and path.is_file() and count < _MOST:
                        count += 1
                        yield path


def _open(path: Path) -> _Seen:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    return _Seen(descriptor, size, _head(descriptor, size))


def _head(descriptor: int, size: int) -> int:
    """Return a checksum of the beginning of what the file was when it had this size."""
    return zlib.crc32(os.pread(descriptor, min(size, _HEAD), 0))
