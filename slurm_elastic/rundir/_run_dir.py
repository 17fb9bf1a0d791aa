"""The files of a run directory, and the check of its file system before there are any."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import NEW_FILE, group_may_write, require_own, require_safe_parent
from slurm_elastic.rundir import _atomic_files, _signed_files
from slurm_elastic.rundir._atomic_files import RecordError, RunDirError, explain, numbered, safe

RUNS = "elastic-runs"
_HEALTH_TOKEN = b"slurm_elastic health token 1\0"
_SUBDIRECTORIES = ("rounds", "epochs", "endpoints", "events", "logs")
_PROBE_BYTES = 65536
_FIX = "give a run directory of your own by --run-dir"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # link(2)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run, ``<base>/elastic-runs/<run id>/``; docs/reference.md has its files.

    Rounds, terms and what one process does for all, such as a requeue, are records that are created exclusively.

    Records of different incarnations are separate: a requeued allocation reads neither terms nor endpoint of the start
    before. Rounds and DONE belong to the whole run.

    Records are JSON objects whose last field is a signature by the run's secret. One without it is not a record of this
    run, and counts as missing. A user who may not read the secret cannot tell, and reads what the owner of the
    directory has written.

    Every method that uses the disk can block for as long as a network file system does; agents call them outside of the
    loop that waits for signals. All are safe among threads, processes and nodes. Every method that uses the disk,
    except `open`, raises `RunDirError` if the disk fails, and if it reads a record that is not one JSON object.
    """

    path: Path
    run_id: str

    @classmethod
    def for_run(cls, base: Path, run_id: str) -> RunDir:
        """Return the directory of a run, without any access to the disk.

        Raises:
            UsageError: The run id is no safe file name.
        """
        return cls(path=Path(base).absolute() / RUNS / safe("run id", run_id), run_id=run_id)

    def open(self) -> RunDir:
        """Create the directory unless it exists, check by writing that it works, and return this object.

        Any number of agents may do this at once.

        Raises:
            UsageError: The base is missing, or the file system is not writable, is full, or has no hard links.
        """
        _make_fit(self.path)
        return self

    def secret(self) -> bytes:
        """Return the run's 32 secret bytes, which the first process draws.

        Raises:
            UsageError: Other users can read the file, it belongs to another user, or it contains no secret.
        """
        path = self.path / "secret"
        with _accessed(path):
            return _signed_files.load_or_create_secret(path)

    def claim_record(self, record: Mapping[str, Any], *place: str | int, mode: int = NEW_FILE) -> bool:
        """Create a signed record, durably. Returns False if another process was first; its record stays.

        Args:
            record: A JSON object.
            place: Where it is below the run directory, such as ``"epochs", "7.0", 1``.
            mode: Mode of the file.
        """
        path = self._place(place)
        with _accessed(path, make=_is_made_by_need(place)):
            return _signed_files.claim(self.path, self.secret(), path, json.dumps(record).encode(), mode)

    def publish_record(self, record: Mapping[str, Any], *place: str | int) -> None:
        """Create or replace a signed record; see `claim_record`."""
        path = self._place(place)
        with _accessed(path, make=_is_made_by_need(place)):
            _signed_files.publish(self.path, self.secret(), path, json.dumps(record).encode())

    def read_record(self, *place: str | int) -> dict[str, Any] | None:
        """Return a record without its signature; None if there is none that this run has written.

        Raises:
            RecordError: The record is not one JSON object.
        """
        content = self.signed_content(self._place(place))
        return None if content is None else dict(typed_json.loads(content))

    def whole_record(self, *place: str | int) -> dict[str, Any] | None:
        """Return a record as `read_record` does; None also if it was cut short, as by a power loss."""
        with contextlib.suppress(RecordError):
            return self.read_record(*place)
        return None

    def keys(self, *above: str) -> list[str]:
        """Return the names of the records in a directory, such as the incarnations in ``endpoints``, in no order."""
        path = self.path.joinpath(*(safe("record", part) for part in above))
        with _accessed(path):
            names = _atomic_files.list_names(path)
        return [name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")]

    def numbers(self, *above: str) -> list[int]:
        """Return the numbers of the records in a directory of numbered ones, the highest first."""
        return sorted((int(key) for key in self.keys(*above) if re.fullmatch(r"[0-9]{6,}", key)), reverse=True)

    def newest(self, *above: str, known: int | None = None) -> int | None:
        """Return the highest number of a record that this run has written; None before the first.

        Args:
            known: A number whose record need not be read to see that this run has written it.
        """
        for number in self.numbers(*above):
            path = self._place((*above, number))
            with _accessed(path):
                if number == known or _signed_files.counts(self.path, path):
                    return number
        return None

    def mark_done(self, record: Mapping[str, Any]) -> bool:
        """Record, durably, that the run is finished. Returns False if another process has recorded it before."""
        return self.claim_record(record, "done")

    def is_done(self) -> bool:
        """Return True if the run is finished.

        Raises:
            RecordError: The record is damaged: nothing says then that the run has trained to its end.
        """
        return self.read_record("done") is not None

    def publish_health(self, node: str, job: str, content: bytes) -> None:
        """Record the address of an agent's health port."""
        path = self._of_agent("health", node, job)
        with _accessed(path, make=True):
            _atomic_files.publish_file(path, content)

    def withdraw_health(self, node: str, job: str) -> None:
        """Remove the record of `publish_health`."""
        path = self._of_agent("health", node, job)
        with _accessed(path):
            path.unlink(missing_ok=True)

    def withdraw_health_of_job(self, job: str) -> None:
        """Remove the records of `publish_health` of all agents of a job."""
        for path in [self._place(("health", key)) for key in self.keys("health") if key.endswith(f".{job}")]:
            with _accessed(path):
                path.unlink(missing_ok=True)

    def health_token(self) -> str:
        """Return the token of the health ports, which follows from the run's secret; the file is for clients.

        No other user who may write to the directory can put a token of their choice there.

        Raises:
            UsageError: Other users can read the file, it belongs to another user, or it contains no token.
        """
        path = self.path / "health-token"
        token = _signed_files.signature(self.secret(), _HEALTH_TOKEN, path.name, b"")
        with _accessed(path):
            if _signed_files.load_or_create_secret(path, lambda: token) != token:
                raise UsageError(f"{path} is not the token of this run; remove it")
        return token.hex()

    def append_event(self, node: str, line: str) -> None:
        """Append a line to the events of a node. Only agents of that node may call this."""
        if "\n" in line:
            raise ValueError(f"an event is one line: {line!r}")
        self._append(self.path / "events" / f"{safe('node name', node)}.jsonl", line + "\n", make=False)

    def append_progress(self, node: str, job: str, line: str) -> None:
        """Append a line to the progress of an agent. Only the agents of that node and job may call this."""
        self._append(self._of_agent("progress", node, job, "jsonl"), line + "\n")

    def append_agent_log(self, node: str, job: str, text: str) -> None:
        """Append lines to the log of an agent. Only the agents of that node and job may call this."""
        self._append(self._of_agent("agents", node, job, "log"), text)

    def log_dir(self, round_number: int, node: str) -> Path:
        """Return the directory for the logs of a node in a round, without making it."""
        return self.path / "logs" / f"round_{round_number:04d}" / safe("node name", node)

    def rank_dir(self, round_number: int, node: str, rank: int, world_size: int) -> Path:
        """Return the directory for the logs of a worker in a round, without making it."""
        width = max(2, len(str(world_size - 1)))
        return self.log_dir(round_number, node) / f"rank_{rank:0{width}d}"

    def signed_content(self, path: Path) -> bytes | None:
        """Return what a signed record's file has beside the signature; see `read_record`."""
        with _accessed(path):
            return _signed_files.read(self.path, path)

    def _place(self, place: Sequence[str | int]) -> Path:
        parts = [numbered(part) if isinstance(part, int) else safe("record", part) for part in place]
        return self.path.joinpath(*parts[:-1], f"{parts[-1]}.json")

    def _of_agent(self, directory: str, node: str, job: str, suffix: str = "json") -> Path:
        return self.path / directory / f"{safe('node name', node)}.{safe('job id', job)}.{suffix}"

    @staticmethod
    def _append(path: Path, text: str, *, make: bool = True) -> None:
        with _accessed(path, make=make):
            _atomic_files.append(path, text.encode(errors="backslashreplace"))


def _is_made_by_need(place: Sequence[str | int]) -> bool:
    """Return True for a record whose directory `open` does not make: one that was there and is gone is an error."""
    return len(place) > 2 or (len(place) == 2 and place[0] not in _SUBDIRECTORIES)


@contextlib.contextmanager
def _accessed(path: Path, *, make: bool = False) -> Iterator[None]:
    try:
        if make:
            _atomic_files.make_directory(path.parent)
        yield
    except OSError as error:
        raise RunDirError(explain(path, error)) from error


def incarnation(run_id: str, restart_count: int) -> str:
    """Return the name of an incarnation: one start of a run, whose records no other start reads."""
    return f"{run_id}.{restart_count}"


def _make_fit(path: Path) -> None:
    base = path.parent.parent
    with _unfit(base):
        # Path.is_dir() is False where this process may not look, since Python 3.14.
        try:
            exists = stat.S_ISDIR(base.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            exists = False
    if not exists:
        raise UsageError(f"{base} is no directory on this node; give a run directory that all nodes share by --run-dir")
    own = [path, *(path / name for name in _SUBDIRECTORIES)]
    for directory in (path.parent, *own):
        with _unfit(directory):
            _atomic_files.make_directory(directory)
    group = group_may_write()
    with _unfit(path):
        owner = _probe(path)
        require_safe_parent(path.parent, (owner,), fix=_FIX, group=group)
        for directory in own:
            # Never the logs: they are written by names, of which a group could make links to other places.
            require_own(directory, (owner,), fix=_FIX, group=group and directory.name != "logs")


def _probe(path: Path) -> int:
    """Write a file and link it: mode bits do not show read-only mounts, quotas or missing hard links.

    Returns:
        The user id that the file server takes this process for.
    """
    with _atomic_files.written(path / "probe", bytes(_PROBE_BYTES)) as temporary:
        link = temporary.with_name(f"{temporary.name}.link")
        try:
            link.hardlink_to(temporary)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise UsageError(
                f"{path}: the file system has no hard links; give a run directory on another by --run-dir"
            ) from None
        link.unlink()
        return temporary.stat().st_uid


@contextlib.contextmanager
def _unfit(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{explain(path, error)}, or give another run directory by --run-dir") from None
