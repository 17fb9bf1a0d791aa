"""The runs of one job: which of them a step is, in this start of the job and after a requeue.

Agents and torchrun's handler join by `join_own` or `join_named`; `job-end` looks at `runs_of_job`. Each start of a run
has one record, created exclusively: its step and its command. So no two steps of a start are the same run.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.environment import state_directory
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import _atomic_files
from slurm_elastic.rundir._atomic_files import RecordError, RunDirError, explain
from slurm_elastic.rundir._run_dir import RUNS, RunDir, incarnation
from slurm_elastic.slurm import SlurmJob
from slurm_elastic.text import printable


@dataclass(frozen=True, slots=True)
class RunStart:
    """The step that has started a run, and its script with arguments.

    Attributes:
        step: Id of the step; empty outside of one, and where agents of several jobs are one run.
        joined: The start, a number, that goes on in this one and in all later ones, because an agent of another job
            has joined it; None for a start of its own.
    """

    step: str
    command: tuple[str, ...]
    joined: int | None = None


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run of the job, as a step finds it.

    Attributes:
        now: Its start in this start of the job; None if no step has begun it.
        before: Its newest earlier start; None if there is none on record.
        over_here: True if an agent on this node has seen the end of the run in this start of the job.
    """

    run_id: str
    now: RunStart | None
    before: RunStart | None = None
    over_here: bool = False
    finished: bool = False


def choose_run(job: SlurmJob, command: tuple[str, ...], runs: Sequence[KnownRun]) -> str:
    """Return the id of the run that this step of the job is.

    A step that has begun a run is this run until it is over. After a requeue, steps may have other numbers: each takes
    a run with its script and arguments, the one of the same number first. A new run has the number of its step.

    Agents of one step look at different moments, and claim what they have chosen. As earlier starts do not change, and
    a run that is taken stays so, they end with the same run.
    """
    step = job.step_id or ""
    for run in runs:
        # On several nodes an agent with another command belongs to the step all the same, and is refused.
        if (
            run.now is not None
            and (run.now.step, run.over_here) == (step, False)
            and (run.now.command == command or len(job.nodes) > 1)
        ):
            return run.run_id
    free = [run for run in runs if run.now is None]
    # One without a record is of an earlier release, or another step is about to begin it.
    same = [run for run in free if (run.before.command == command if run.before else run.run_id == job.run_id)]
    if same:
        return min(same, key=lambda run: run.before is not None and run.before.step != step).run_id
    # The only run of the job: after a requeue its script may give other arguments, such as --resume.
    begun = [(run, run.before) for run in runs if run.before is not None]
    for run, before in begun if len(begun) == 1 else ():
        if run.now is None and not run.finished and (before.step, before.command[:1]) == (step, command[:1]):
            return run.run_id
    # Not a directory without a record: agents of this step that look at other moments may find none there.
    taken, number = {run.run_id for run in runs if run.now or run.before}, int(step or 0)
    while (run_id := f"{job.name}.{number}" if number else job.name) in taken:
        number += 1
    return run_id


def join_own(base: Path, job: SlurmJob, command: Sequence[str]) -> RunDir:
    """Return the directory, opened, of the run that this step of the job is.

    Raises:
        UsageError: Another agent of the step has begun it with another script or other arguments.
        RunDirError: The directory cannot be read or written.
    """
    start = RunStart(job.step_id or "", tuple(command))
    while True:
        runs = [_known(run_dir, job) for run_dir in runs_of_job(base, job.name)]
        run_dir = RunDir.for_run(base, choose_run(job, start.command, runs))
        if any(run.run_id == run_dir.run_id and run.now is not None for run in runs):
            _require_same(run_dir.open(), run_start(run_dir, job.restart_count), start)
            return run_dir
        if _claim(run_dir.open(), job.restart_count, start) or _joined(run_dir, job.restart_count) is not None:
            return run_dir


def join_named(run_dir: RunDir, command: Sequence[str], *, again: bool) -> None:
    """Join a run that agents of several jobs are.

    If a step of one job has begun it, later starts of that job join it, too, instead of beginning an incarnation of
    their own beside this agent. Which start that is, is decided where starts are claimed.

    Args:
        again: True if Slurm has started its job again; then its arguments may have changed since.

    Raises:
        UsageError: The run has another script or other arguments.
    """
    start = RunStart("", tuple(command))
    if _claim(run_dir, 0, start):
        return
    begun = run_start(run_dir)
    if not again:
        _require_same(run_dir, begun, start)
    while begun is not None and begun.step and _joined(run_dir, None) is None:
        newest = max(run_dir.numbers("starts"))
        _claim(run_dir, newest + 1, replace(begun, joined=newest))


def incarnation_of(run_dir: RunDir, restart_count: int | None) -> str:
    """Return the name of the incarnation that agents belong to which have joined the run.

    Args:
        restart_count: Restart count of the job that has begun the run; None for a run of several jobs.
    """
    # The first start of a job joins no earlier one.
    joined = _joined(run_dir, restart_count) if restart_count != 0 else None
    return incarnation(run_dir.run_id, (restart_count or 0) if joined is None else joined)


def failure_of(run_dir: RunDir, restart_count: int | None) -> dict[str, Any] | None:
    """Return the record of why the run failed in a start of its job; None if it did not. See `incarnation_of`."""
    return run_dir.read_record("failures", incarnation_of(run_dir, restart_count))


def runs_of_job(base: Path, name: str) -> list[RunDir]:
    """Return the directories of a job's runs, in the order of their numbers.

    Args:
        name: The job, as ``12``, or ``12_3`` for an array element.
    """
    pattern, directory = re.compile(rf"{re.escape(name)}(?:\.([0-9]{{1,9}}))?"), base.absolute() / RUNS
    try:
        matches = [match for name in _atomic_files.list_names(directory) if (match := pattern.fullmatch(name))]
    except OSError as error:
        raise RunDirError(explain(directory, error)) from error
    return [RunDir.for_run(base, match[0]) for match in sorted(matches, key=lambda match: int(match[1] or 0))]


def run_start(run_dir: RunDir, restart_count: int | None = None, *, before: int | None = None) -> RunStart | None:
    """Return the record of a start of the run, by default of the newest; None if there is none.

    Args:
        restart_count: Restart count of the job; 0 for a run of several jobs.
        before: Only starts before this one count.
    """
    if restart_count is None:
        counts = [count for count in run_dir.numbers("starts") if before is None or count < before]
        if not counts:
            return None
        restart_count = counts[0]
    try:
        record = run_dir.whole_record("starts", restart_count) or {}
        joined = record.get("joined")
        return RunStart(
            str(record["step"]), tuple(map(str, record["command"])), joined if isinstance(joined, int) else None
        )
    except (KeyError, TypeError):
        return None


def _known(run_dir: RunDir, job: SlurmJob) -> KnownRun:
    restarts = job.restart_count
    now, before = run_start(run_dir, restarts), run_start(run_dir, before=restarts) if restarts else None
    if now is not None and now.joined is not None:
        now, before = None, now
    return KnownRun(
        run_dir.run_id,
        now,
        before,
        over_here=_is_over_here(run_dir, job),
        finished=run_dir.is_done(),
    )


def _is_over_here(run_dir: RunDir, job: SlurmJob) -> bool:
    """Return True if this node's last agent in this start of the job has seen the run finish or fail for good."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError, RecordError):
        text = _atomic_files.read_file(run_dir.path / "progress" / f"{job.node}.{job.job_id}.jsonl") or b""
        last = typed_json.loads(text.splitlines()[-1])
        if str(last.get("agent")).startswith(f"{job.node}/{job.job_id}.{job.restart_count}/"):
            code = last.get("exit_code") if last.get("event") == "agent_ended" else None
            failed = code == 1 and failure_of(run_dir, job.restart_count) is not None
            return code == 0 or failed
    return False


def _joined(run_dir: RunDir, restart_count: int | None) -> int | None:
    """Return the start that goes on in this start of the job, with None in its newest one; None if none does."""
    for number in run_dir.numbers("starts"):
        if restart_count is None or number <= restart_count:
            start = run_start(run_dir, number)
            if start is not None and start.joined is not None:
                return start.joined
    return None


def _claim(run_dir: RunDir, restart_count: int, start: RunStart) -> bool:
    joined = {} if start.joined is None else {"joined": start.joined}
    return run_dir.claim_record({"step": start.step, "command": start.command, **joined}, "starts", restart_count)


def _require_same(run_dir: RunDir, begun: RunStart | None, start: RunStart) -> None:
    if begun is not None and begun.command != start.command:
        theirs, own = (printable(shlex.join(command), 200) for command in (begun.command, start.command))
        raise UsageError(
            f"run {run_dir.run_id} is {theirs!r}, and this agent has {own!r}: agents of a run have the same script and "
            "arguments; for a run of its own give it another --run-id"
        )


@dataclass(frozen=True, slots=True)
class JobRecords:
    """Records of a job in its run's directory, by restart count.

    Methods block for as long as the file system does, and raise `RunDirError` if the disk fails.
    """

    run_dir: RunDir
    job_id: str

    def publish_notice(self, restart_count: int, record: Mapping[str, Any]) -> None:
        """Record the signals that the job got, and their diagnosis."""
        self.run_dir.publish_record(record, "notices", f"{self.job_id}.{restart_count}")

    def notice(self, restart_count: int) -> dict[str, Any] | None:
        """Return the record of `publish_notice`; None if there is none that can be read."""
        return self._read("notices", restart_count)

    def publish_grace(self, restart_count: int, seconds: float) -> None:
        """Record the seconds that a SIGTERM leaves to the job at the least."""
        self.run_dir.publish_record({"seconds": seconds}, "graces", f"{self.job_id}.{restart_count}")

    def grace(self, restart_count: int) -> float | None:
        """Return what `publish_grace` has recorded; None if there is no record that can be read."""
        seconds = (self._read("graces", restart_count) or {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    def claim_requeue(self, restart_count: int, record: Mapping[str, Any]) -> bool:
        """Claim the requeue of this start of the job. Returns False if another process has claimed it."""
        return self.run_dir.claim_record(record, "requeues", f"{self.job_id}.{restart_count}")

    def requeues(self) -> list[dict[str, Any]]:
        """Return the records of all requeues of this job, the oldest first."""
        pattern = re.compile(rf"{re.escape(self.job_id)}\.([0-9]+)")
        counts = sorted(int(match[1]) for key in self.run_dir.keys("requeues") if (match := pattern.fullmatch(key)))
        return [record for count in counts if (record := self._read("requeues", count)) is not None]

    def _read(self, kind: str, restart_count: int) -> dict[str, Any] | None:
        return self.run_dir.whole_record(kind, f"{self.job_id}.{restart_count}")


# The directories in which this user has runs, so that commands find a run by its id from anywhere.
#
# One file for each directory, in the user's state directory. Agents add to them; what cannot be written or read is
# left out, as a run does not need it.
def remember_directory(base: Path) -> None:
    """Add a directory below which runs are."""
    path = str(base.absolute())
    with contextlib.suppress(OSError, UnicodeError):
        directory = state_directory() / "runs"
        file = directory / hashlib.sha256(path.encode()).hexdigest()[:32]
        if not file.exists():
            directory.mkdir(0o700, parents=True, exist_ok=True)
            _atomic_files.publish_file(file, path.encode())


def known_directories() -> list[Path]:
    """Return all directories that were added, in the order of their names."""
    paths = []
    with contextlib.suppress(OSError):
        directory = state_directory() / "runs"
        for name in _atomic_files.list_names(directory):
            with contextlib.suppress(OSError, UnicodeError):
                paths.append(Path((_atomic_files.read_file(directory / name) or b"").decode()))
    return sorted(path for path in paths if path.is_absolute())
