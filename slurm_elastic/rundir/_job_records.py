"""The records of a job of a run: its notices and its requeues."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.rundir import _atomic_files
from slurm_elastic.rundir._errors import RecordError, RunDirError, explain
from slurm_elastic.rundir._run_dir import RunDir


@dataclass(frozen=True, slots=True)
class JobRecords:
    """Records of a job in its run's directory, by restart count.

    ::

        notices/<job id>.<restart count>.json    why this start of the job has to end; replaced as more becomes known
        graces/<job id>.<restart count>.json     the seconds that a SIGTERM leaves at the least
        requeues/<job id>.<restart count>.json   created exclusively by the process that requeues the job

    Methods block for as long as the file system does, and raise `RunDirError` if the disk fails.
    """

    run_dir: RunDir
    job_id: str

    def publish_notice(self, restart_count: int, record: Mapping[str, Any]) -> None:
        """Record the signals that the job got, and their diagnosis."""
        path = self._path("notices", restart_count)
        with self._accessed(path):
            self.run_dir.publish_record(path, json.dumps(record).encode())

    def notice(self, restart_count: int) -> dict[str, Any] | None:
        """Return the record of `publish_notice`; None if there is none that can be read."""
        return self._read(self._path("notices", restart_count))

    def publish_grace(self, restart_count: int, seconds: float) -> None:
        """Record the seconds that a SIGTERM leaves to the job at the least."""
        path = self._path("graces", restart_count)
        with self._accessed(path):
            self.run_dir.publish_record(path, json.dumps({"seconds": seconds}).encode())

    def grace(self, restart_count: int) -> float | None:
        """Return what `publish_grace` has recorded; None if there is no record that can be read."""
        seconds = (self._read(self._path("graces", restart_count)) or {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    def claim_requeue(self, restart_count: int, record: Mapping[str, Any]) -> bool:
        """Claim the requeue of this start of the job. Returns False if another process has claimed it."""
        path = self._path("requeues", restart_count)
        with self._accessed(path):
            return self.run_dir.claim_record(path, json.dumps(record).encode())

    def requeues(self) -> list[dict[str, Any]]:
        """Return the records of all requeues of this job, the oldest first."""
        directory = self.run_dir.path / "requeues"
        pattern = re.compile(rf"{re.escape(self.job_id)}\.([0-9]+)\.json")
        with self._accessed(directory / "_", make=False):
            names = _atomic_files.list_names(directory)
        counts = sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
        records = [self._read(self._path("requeues", count)) for count in counts]
        return [record for record in records if record is not None]

    def _path(self, directory: str, restart_count: int) -> Path:
        return self.run_dir.path / directory / f"{self.job_id}.{restart_count}.json"

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            content = self.run_dir.read_record(path)
        except RecordError:
            return None
        return None if content is None else dict(typed_json.loads(content))

    @staticmethod
    @contextlib.contextmanager
    def _accessed(path: Path, *, make: bool = True) -> Iterator[None]:
        try:
            if make:
                _atomic_files.make_directory(path.parent)
            yield
        except OSError as error:
            raise RunDirError(explain(path, error)) from error
