"""Files of a rehearsed run: those that a kill may leave half written, and those in which workers write what they do."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from slurm_elastic import typed_json
from slurm_elastic.rehearsal.facts import WorkerSeen

_HEAD = 65536
_MOST = 256
"""Files that are watched."""


class WatchedFiles:
    """Files that were complete at one moment, and are looked at again later.

    The files stay open, so that no other file gets their inodes: one that was replaced by renaming another over it has
    kept its content, and one that was changed in place has not. A file that only grew, such as a log, is none of them.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._seen: dict[Path, tuple[BinaryIO, int, int]] = {}
        """Each file with its size and the checksum of its beginning."""
        self.overwritten: set[Path] = set()
        """The files that were changed in place so far."""

    def look(self, *, complete: bool) -> None:
        """Look at all files, and with `complete`, when no worker writes, watch those that are new."""
        for path, (file, size, head) in self._seen.items():
            if os.fstat(file.fileno()).st_size < size or _head(file, size) != head:
                self.overwritten.add(path)
        if complete:
            self.close()
            for path in islice(filter(Path.is_file, entries(self._roots)), _MOST):
                with contextlib.suppress(OSError):
                    file = path.open("rb", buffering=0)
                    size = os.fstat(file.fileno()).st_size
                    self._seen[path] = file, size, _head(file, size)

    def close(self) -> None:
        """Close the files."""
        for file, _, _ in self._seen.values():
            file.close()
        self._seen.clear()


def _head(file: BinaryIO, size: int) -> int:
    """Return a checksum of the beginning of what the file was when it had this size."""
    return zlib.crc32(os.pread(file.fileno(), min(size, _HEAD), 0))


NamePattern = tuple[str, str]
"""What a name has before and after a number."""

_NUMBER = re.compile(r"\d+")
_IN_MOVED_TO, _IN_CREATE, _IN_ISDIR, _IN_ONLYDIR = 0x80, 0x100, 0x40000000, 0x01000000
_EVENT = struct.Struct("iIII")


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A file or directory with a step in its name; `width` is the number of digits."""

    path: Path
    step: int
    width: int
    pattern: NamePattern

    def of_step(self, step: int) -> Path:
        """Return the path that another step would have."""
        before, after = self.pattern
        return self.path.with_name(f"{before}{step:0{self.width}d}{after}")


def patterns(name: str) -> list[tuple[NamePattern, str]]:
    """Return each number in a name, as it is written, with what is around it."""
    return [((name[: match.start()], name[match.end() :]), match[0]) for match in _NUMBER.finditer(name)]


def newest_in_place(
    paths: Iterable[Path], steps: Collection[int], in_place: Collection[NamePattern]
) -> StepEntry | None:
    """Return the newest checkpoint that was written under its own name; None if there is none.

    Args:
        steps: Steps of the checkpoints that workers have reported. Names that are also there with another number, such
            as those of rounds, are none of checkpoints.
        in_place: See `NewNames.in_place`.
    """
    groups: dict[tuple[Path, NamePattern], list[StepEntry]] = defaultdict(list)
    for path in paths:
        for pattern, digits in patterns(path.name):
            if pattern in in_place:
                groups[path.parent, pattern].append(StepEntry(path, int(digits), len(digits), pattern))
    candidates = [file for group in groups.values() if all(file.step in steps for file in group) for file in group]
    # A directory of a checkpoint may have files with its step in their names.
    return max(candidates, key=lambda file: (file.step, -len(file.path.parts)), default=None)


def entries(roots: Sequence[Path]) -> Iterator[Path]:
    """Yield all files and directories, without links."""
    for root in roots:
        for directory, directories, files in os.walk(root):
            for name in (*directories, *files):
                path = Path(directory, name)
                if not path.is_symlink():
                    yield path


def leave_half(source: Path, target: Path) -> None:
    """Make of a checkpoint what a kill while it was written would have left: its older files, the last one cut."""
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    files.sort(key=lambda path: path.stat().st_mtime_ns)
    half = files[: (len(files) + 1) // 2]
    for path in half:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if half:
        os.truncate(copy, copy.stat().st_size // 2)
    else:
        target.mkdir()


class NewNames:
    """The names that files and directories below a root got, without their numbers.

    What is made in a directory that is as new as itself may be missed.
    """

    def __init__(self, root: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        """Negative where nothing is known any more."""
        self._made: set[NamePattern] = set()
        self._renamed: set[NamePattern] = set()
        self._directories: dict[int, Path] = {}
        self._watch(root)

    @property
    def in_place(self) -> set[NamePattern]:
        """The names that were given to what was empty, and never to what had another name; empty if it is unknown."""
        return self._made - self._renamed if self._descriptor >= 0 else set()

    def read(self) -> None:
        """Take what has happened since the last call."""
        while self._descriptor >= 0:
            try:
                content = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(content):
                watch, mask, _, length = _EVENT.unpack_from(content, offset)
                offset += _EVENT.size + length
                self._note(watch, mask, os.fsdecode(content[offset - length : offset].rstrip(b"\0")))

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _note(self, watch: int, mask: int, name: str) -> None:
        directory = self._directories.get(watch)
        if directory is None:
            # The kernel has dropped events.
            self.close()
            return
        for bit, names in ((_IN_CREATE, self._made), (_IN_MOVED_TO, self._renamed)):
            if mask & bit:
                names.update(pattern for pattern, _ in patterns(name))
        if mask & _IN_ISDIR:
            self._watch(directory / name)

    def _watch(self, root: Path) -> None:
        """Watch a directory and those in it."""
        for directory, _, _ in os.walk(root):
            mask = _IN_CREATE | _IN_MOVED_TO | _IN_ONLYDIR
            watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(directory), mask)
            if watch >= 0:
                self._directories[watch] = Path(directory)
            elif ctypes.get_errno() not in (errno.ENOENT, errno.ENOTDIR):
                # More directories than the kernel lets a user watch.
                self.close()


class Recordings:
    """The workers of a run, as they have written down what they do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workers: dict[Path, WorkerSeen] = {}
        """By their files, whose names are in the order of rounds and ranks."""
        self._read: Counter[Path] = Counter()
        """Bytes of each file that were read."""

    @property
    def newest(self) -> int:
        """Number of the newest round with a worker."""
        return max((worker.round for worker in self._workers.values()), default=0)

    def read(self) -> bool:
        """Read the lines that are new, without one that is cut short; return True if there was one."""
        before = self._read.total()
        for path in self._directory.glob("*.jsonl"):
            if path.stat().st_size > self._read[path]:
                with path.open("rb") as file:
                    file.seek(self._read[path])
                    lines = [line for line in file if line.endswith(b"\n")]
                self._read[path] += sum(map(len, lines))
                for line in lines:
                    # On a file system that was full for a while a line may be cut within the file.
                    with contextlib.suppress(typed_json.JSONError):
                        record = typed_json.loads(line)
                        if path in self._workers:
                            self._workers[path].note(record)
                        elif record["event"] == "begins":
                            node, pid, size = record["node"], record["pid"], record["world_size"]
                            self._workers[path] = WorkerSeen(record["round"], record["rank"], node, pid, size)
        return self._read.total() > before

    def waiting(self) -> tuple[int, int, int]:
        """Return the mishap, or -1, that workers of the newest round wait for, how many do, and how many there are."""
        workers = self.of_round(self.newest)
        waits = [worker.waits for worker in workers if worker.waits is not None]
        return min(waits, default=-1), len(waits), max((worker.world_size for worker in workers), default=0)

    def stopped(self, round_: int) -> bool:
        """Return True if a worker of the round was told to stop, or a later round has workers."""
        return self.newest > round_ or any(worker.stop is not None for worker in self.of_round(round_))

    def saved(self, round_: int, step: int) -> bool:
        """Return True if a worker of a later round has reported a checkpoint of a later step."""
        later = (worker for worker in self.workers() if worker.round > round_)
        return any(saved > step for worker in later for saved in worker.checkpoints)

    def ended(self, round_: int, node: str) -> bool:
        """Return True if all workers of a node have ended without a signal."""
        return all(worker.ended is not None for worker in self.of_round(round_) if worker.node == node)

    def of_round(self, round_: int) -> list[WorkerSeen]:
        """Return the workers of a round, in the order of ranks."""
        return [worker for worker in self.workers() if worker.round == round_]

    def workers(self) -> tuple[WorkerSeen, ...]:
        """Return all workers, in the order of rounds and ranks."""
        return tuple(worker for _, worker in sorted(self._workers.items()))
