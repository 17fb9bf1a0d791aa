"""A run directory as a program outside of the run reads it: parts may be missing, damaged, or still being written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.ownership import open_own
from slurm_elastic.rundir import _atomic_files
from slurm_elastic.rundir._atomic_files import RecordError, RunDirError, explain, is_safe
from slurm_elastic.rundir._run_dir import RUNS, RunDir

_READERS = 16
"""Threads that read files: a network file system takes milliseconds for each, and a run has two for every node."""
_LOGS = re.compile(r"round_([0-9]{1,9})")
_RANK = re.compile(r"rank_([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file of a run directory.

    Attributes:
        name: Path of the file below the run directory.
        content: All bytes of the file.
    """

    name: str
    content: bytes

    @property
    def stem(self) -> str:
        """The name of the file without directory and suffix."""
        return Path(self.name).stem


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """A log of a worker.

    Attributes:
        stream: ``stdout`` or ``stderr``.
    """

    round: int
    node: str
    rank: int
    stream: str
    path: Path

    @property
    def key(self) -> str:
        """The log's name in the file of times: ``rank_05/stdout.log``."""
        return f"{self.path.parent.name}/{self.path.name}"


def run_ids(base: Path) -> list[str]:
    """Return the ids of all runs below a directory, as far as it can be read; empty if it has none.

    Other directories are there, too: agents keep the lists of learned imports beside the runs.
    """
    with contextlib.suppress(OSError):
        entries = [*(base.absolute() / RUNS).iterdir()]
        return sorted(entry.name for entry in entries if is_safe(entry.name) and entry.is_dir())
    return []


class RunContents:
    """Reads the files of a run directory; a file or directory that cannot be read is one line in `problems`.

    Records without a signature of the run are left out, as agents do, and so are files of other users.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self.problems: list[str] = []

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run_dir.path

    def done(self) -> list[RunFile]:
        """Return the record of a finished run; none if the run is not finished."""
        return self._records([self.path / "done.json"])

    def records(self, kind: str) -> list[RunFile]:
        """Return the signed records of a kind, in the order of their names: ``rounds``, ``endpoints``, ..."""
        return self._records(self._names(kind, ".json"))

    def events(self) -> list[RunFile]:
        """Return the events, by node."""
        return self._read(self._names("events", ".jsonl"))

    def progress(self) -> list[RunFile]:
        """Return the progress, by node and job."""
        return self._read(self._names("progress", ".jsonl"))

    def jobs(self) -> frozenset[str]:
        """Return the jobs of which an agent has taken part in the run."""
        return frozenset(path.name.split(".")[-2] for path in self._names("progress", ".jsonl"))

    def log_rounds(self) -> list[int]:
        """Return the numbers of the rounds that have logs, in their order."""
        return sorted(int(match[1]) for name in self._list("logs") if (match := _LOGS.fullmatch(name)))

    def logs(self, round_number: int) -> list[LogFile]:
        """Return the logs of a round, in the order of nodes and ranks."""
        return sorted(
            LogFile(round_number, node, rank, stream, path)
            for node, rank, directory in self._rank_directories(round_number)
            for stream in ("stderr", "stdout")
            if (path := directory / f"{stream}.log").is_file()
        )

    def log_times(self, round_number: int) -> list[tuple[str, RunFile]]:
        """Return the files of times of a round, each with its node."""
        paths = [directory / "times.jsonl" for _node, _rank, directory in self._rank_directories(round_number)]
        files = self._read(path for path in paths if path.is_file())
        return [(Path(file.name).parts[-3], file) for file in files]

    def error_files(self, round_number: int) -> list[tuple[str, int, Path]]:
        """Return the error files of a round, each with its node and rank."""
        places = ((node, rank, path / "error.json") for node, rank, path in self._rank_directories(round_number))
        return sorted((node, rank, path) for node, rank, path in places if path.is_file())

    def read(self, path: Path, offset: int, most: int) -> bytes:
        """Return at most `most` bytes of a log from an offset on; empty at its end, or if it cannot be read."""
        try:
            with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
                file.seek(offset)
                return file.read(most)
        except OSError as error:
            self._complain(path, error)
            return b""

    def size_and_time(self, path: Path) -> tuple[int, float]:
        """Return the bytes of a log and when it was written to last, in seconds since 1970; zeros if unknown."""
        with contextlib.suppress(OSError):
            return (status := path.stat()).st_size, status.st_mtime
        return 0, 0.0

    def health(self) -> list[RunFile]:
        """Return where the health ports of agents are, by node and job."""
        return self._read(self._names("health", ".json"))

    def _rank_directories(self, round_number: int) -> Iterator[tuple[str, int, Path]]:
        above = f"logs/round_{round_number:04d}"
        for node in self._list(above):
            for name in self._list(f"{above}/{node}"):
                if match := _RANK.fullmatch(name):
                    yield node, int(match[1]), self.path / above / node / name

    def _names(self, directory: str, suffix: str) -> list[Path]:
        names = (name for name in self._list(directory) if name.endswith(suffix) and not name.startswith("."))
        return [self.path / directory / name for name in sorted(names)]

    def _list(self, directory: str) -> list[str]:
        path = self.path / directory
        try:
            return _atomic_files.list_names(path)
        except NotADirectoryError:
            return []
        except OSError as error:
            self._complain(path, error)
            return []

    def _records(self, paths: Iterable[Path]) -> list[RunFile]:
        """Read signed records; one that was cut short has no content."""
        files = []
        for path in paths:
            name = path.relative_to(self.path).as_posix()
            try:
                content = self._run_dir.signed_content(path)
            except RecordError:
                content = b""
            except RunDirError as error:
                self.problems.append(str(error))
                continue
            if content is not None:
                files.append(RunFile(name, content))
            elif os.path.lexists(path):
                self.problems.append(f"{name} was not written by this run; it is left out")
        return files

    def _read(self, paths: Iterable[Path]) -> list[RunFile]:
        listed = list(paths)
        if len(listed) <= 1:
            return [file for path in listed if (file := self._one(path))]
        with ThreadPoolExecutor(_READERS) as pool:
            return [file for file in pool.map(self._one, listed) if file is not None]

    def _one(self, path: Path) -> RunFile | None:
        try:
            content = _atomic_files.read_file(path)
        except OSError as error:
            self._complain(path, error)
            return None
        return None if content is None else RunFile(path.relative_to(self.path).as_posix(), content)

    def _complain(self, path: Path, error: OSError) -> None:
        line = explain(path, error)
        if line not in self.problems:
            self.problems.append(line)
