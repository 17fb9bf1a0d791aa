"""The files of a run directory, and the check of its file system before there are any."""

from __future__ import annotations

import contextlib
import errno
import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.errors import UsageError
from slurm_elastic.ownership import NEW_FILE, group_may_write, require_own, require_safe_parent
from slurm_elastic.rundir import _atomic_files
from slurm_elastic.rundir._atomic_files import RunDirError, descending_numbers, explain, numbered, safe
from slurm_elastic.rundir._signed_files import SignedFiles, load_or_create_secret, signature

RUNS = "elastic-runs"
_HEALTH_TOKEN = b"slurm_elastic health token 1\0"
_SUBDIRECTORIES = ("rounds", "epochs", "endpoints", "events", "logs")
_PROBE_BYTES = 65536
_FIX = "give a run directory of your own by --run-dir"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # link(2)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run.

    ::

        <base>/elastic-runs/<run id>/
            secret                        hex, mode 0600
            done.json                           the run is finished
            command.json                        how the run was started, mode 0600, created exclusively
            rounds/000003.json                  one per round, created exclusively
            epochs/<incarnation>/000001.json    one per term, created exclusively
            failures/<incarnation>.json         why that incarnation failed
            starts/000000.json                  step and command of a start of the job, created exclusively
            replacements/000001.json            a job for nodes that were lost, created exclusively before sbatch
            replaced/000001.json                what has become of it, created exclusively
            health/<node>.<job>.json            address of an agent's health port, while it is open
            notified/<event>.json               a notification, created exclusively before it is delivered
            health-token                        token for all pages of health ports but liveness, mode 0600
            endpoints/<incarnation>.json        address of the leader, replaced when it changes
            events/<node>.jsonl                 appended to by the agents of that node
            progress/<node>.<job>.jsonl         appended to by the agent of that node and job
            logs/round_0003/<node>/rank_05/

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
            return load_or_create_secret(path)

    def publish(self, name: str, content: bytes) -> None:
        """Create or replace a file."""
        path = self.path / safe("file name", name)
        with _accessed(path):
            _atomic_files.publish_file(path, content)

    def claim(self, name: str, content: bytes) -> bool:
        """Create a file. Returns False if another process was first."""
        path = self.path / safe("file name", name)
        with _accessed(path):
            return _atomic_files.claim_file(path, content)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        path = self.path / safe("file name", name)
        with _accessed(path):
            return _atomic_files.read_file(path)

    def mark_done(self, record: Mapping[str, Any]) -> bool:
        """Record, durably, that the run is finished.

        Returns:
            False if another process has recorded it before; that record stays.
        """
        return self.claim_record(self.path / "done.json", json.dumps(record).encode())

    def is_done(self) -> bool:
        """Return True if the run is finished.

        Raises:
            RecordError: The record is damaged: nothing says then that the run has trained to its end.
        """
        return self.read_record(self.path / "done.json") is not None

    def claim_notification(self, key: str, record: Mapping[str, Any]) -> bool:
        """Record that a notification is delivered. Returns False if another agent has recorded it before."""
        path = self.path / "notified" / f"{safe('notification', key)}.json"
        return self.claim_record(path, json.dumps(record).encode(), make=True)

    def claim_command(self, content: bytes) -> bool:
        """Record how the run was started, for its user alone. Returns False if another process has recorded it."""
        return self.claim_record(self.path / "command.json", content, mode=0o600)

    def command(self) -> bytes | None:
        """Return the record of `claim_command`; None if there is none."""
        return self.read_record(self.path / "command.json")

    def claim_start(self, number: int, content: bytes) -> bool:
        """Record who has begun a start of the run. Returns False if another agent has recorded it before."""
        return self._claim_numbered("starts", number, content)

    def start(self, number: int) -> bytes | None:
        """Return the record of `claim_start`; None if there is none."""
        return self.read_record(self._numbered("starts", number))

    def start_numbers(self) -> list[int]:
        """Return the numbers of all starts on record, the highest first."""
        return self._numbers("starts")

    def claim_replacement(self, number: int, content: bytes) -> bool:
        """Record that a job is about to be submitted for lost nodes; number 0 has the user's options.

        Returns:
            False if another agent was first.
        """
        return self._claim_numbered("replacements", number, content)

    def claim_replaced(self, number: int, content: bytes) -> bool:
        """Record what has become of a replacement. Returns False if another agent was first."""
        return self._claim_numbered("replaced", number, content)

    def publish_replaced(self, number: int, content: bytes) -> None:
        """Replace the record of `claim_replaced`."""
        self.publish_record(self._numbered("replaced", number), content)

    def replacements(self) -> dict[int, tuple[bytes, bytes | None]]:
        """Return the records of `claim_replacement` and `claim_replaced` by their numbers, in the order of these."""
        return {
            number: (claim, self.read_record(self._numbered("replaced", number)))
            for number in reversed(self._numbers("replacements"))
            if (claim := self.read_record(self._numbered("replacements", number))) is not None
        }

    def claim_round(self, number: int, content: bytes) -> bool:
        """Create the record of a round. Returns False if the number is taken."""
        return self.claim_record(self._numbered("rounds", number), content)

    def last_round(self, known_round: int | None = None) -> int | None:
        """Return the number of the newest round; None before the first round.

        Args:
            known_round: Number of a round of this run whose record need not be read to see that this run has written
                it.
        """
        return self._newest("rounds", known_round)

    def round_record(self, number: int) -> bytes | None:
        """Return the record of a round; None if there is none."""
        return self.read_record(self._numbered("rounds", number))

    def claim_epoch(self, incarnation: str, number: int, content: bytes) -> bool:
        """Create the record of a term. Returns False if the number is taken."""
        return self._claim_numbered(f"epochs/{safe('incarnation', incarnation)}", number, content)

    def newest_epoch(self, incarnation: str) -> int | None:
        """Return the number of the newest term of an incarnation; None before the first."""
        return self._newest(f"epochs/{safe('incarnation', incarnation)}")

    def epoch_record(self, incarnation: str, number: int) -> bytes | None:
        """Return the record of a term; None if there is none."""
        return self.read_record(self._numbered(f"epochs/{safe('incarnation', incarnation)}", number))

    def publish_endpoint(self, incarnation: str, content: bytes) -> None:
        """Record the endpoint of the leader."""
        self.publish_record(self._of_incarnation("endpoints", incarnation), content)

    def endpoint(self, incarnation: str) -> bytes | None:
        """Return the last record of `publish_endpoint`; None before the first."""
        return self.read_record(self._of_incarnation("endpoints", incarnation))

    def incarnations(self) -> list[str]:
        """Return the incarnations that have an endpoint, in no order."""
        return [name.removesuffix(".json") for name in self.names("endpoints") if name.endswith(".json")]

    def publish_failure(self, incarnation: str, content: bytes) -> None:
        """Record why an incarnation of the run failed."""
        self.publish_record(self._of_incarnation("failures", incarnation), content, make=True)

    def failure(self, incarnation: str) -> bytes | None:
        """Return why an incarnation of the run failed; None if it did not."""
        return self.read_record(self._of_incarnation("failures", incarnation))

    def failures(self) -> tuple[bytes, ...]:
        """Return the records of `publish_failure` of all incarnations, in no order."""
        records = (self.read_record(self.path / "failures" / name) for name in self.names("failures"))
        return tuple(content for content in records if content is not None)

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
        suffix = f".{safe('job id', job)}.json"
        for path in [self.path / "health" / name for name in self.names("health") if name.endswith(suffix)]:
            with _accessed(path):
                path.unlink(missing_ok=True)

    def health_token(self) -> str:
        """Return the token of the health ports, which follows from the run's secret; the file is for clients.

        No other user who may write to the directory can put a token of their choice there.

        Raises:
            UsageError: Other users can read the file, it belongs to another user, or it contains no token.
        """
        path = self.path / "health-token"
        token = signature(self.secret(), _HEALTH_TOKEN, path.name, b"")
        with _accessed(path):
            if load_or_create_secret(path, lambda: token) != token:
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

    def publish_record(self, path: Path, content: bytes, *, make: bool = False) -> None:
        """Create or replace a signed record, a JSON object; with `make` also its directory."""
        with _accessed(path, make=make):
            _atomic_files.publish_file(path, self._signed.sign(self.secret(), path, content))

    def claim_record(self, path: Path, content: bytes, *, make: bool = False, mode: int = NEW_FILE) -> bool:
        """Create a signed record, a JSON object. Returns False if another process was first."""
        with _accessed(path, make=make):
            return self._signed.claim(self.secret(), path, content, mode)

    def read_record(self, path: Path) -> bytes | None:
        """Return a record without its signature; None if there is none that this run has written.

        Raises:
            RecordError: The record is not one JSON object.
        """
        with _accessed(path):
            return self._signed.read(path)

    def names(self, directory: str) -> list[str]:
        """Return the names of the files in a subdirectory, in no order."""
        path = self.path / directory
        with _accessed(path):
            return [name for name in _atomic_files.list_names(path) if not name.startswith(".")]

    @property
    def _signed(self) -> SignedFiles:
        return SignedFiles(self.path)

    def _of_incarnation(self, directory: str, incarnation: str) -> Path:
        return self.path / directory / f"{safe('incarnation', incarnation)}.json"

    def _of_agent(self, directory: str, node: str, job: str, suffix: str = "json") -> Path:
        return self.path / directory / f"{safe('node name', node)}.{safe('job id', job)}.{suffix}"

    def _numbered(self, directory: str, number: int) -> Path:
        return self.path / directory / numbered(number)

    def _claim_numbered(self, directory: str, number: int, content: bytes) -> bool:
        return self.claim_record(self._numbered(directory, number), content, make=True)

    def _numbers(self, directory: str) -> list[int]:
        return descending_numbers(self.names(directory))

    def _newest(self, directory: str, known_number: int | None = None) -> int | None:
        for number in self._numbers(directory):
            path = self._numbered(directory, number)
            with _accessed(path):
                if number == known_number or self._signed.counts(path):
                    return number
        return None

    @staticmethod
    def _append(path: Path, text: str, *, make: bool = True) -> None:
        with _accessed(path, make=make):
            _atomic_files.append(path, text.encode(errors="backslashreplace"))


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
