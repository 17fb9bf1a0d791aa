"""A feature of the agent: says what the failure of a worker is, as the registry of failures knows it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.root_cause import aborted_at_exit, named_error, words
from slurm_elastic.failures import BY_KERNEL, Attribution, Domain, Outlook, attribute, fingerprint, position
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.text import size_text

_ROOT = Path("/")


def memory_kills(root: Path = _ROOT) -> int | None:
    """Return the number of processes of this agent's control group that the kernel has killed for lack of memory.

    Workers are in the control group of their agent. Where it has no counter, those of the whole node are counted.

    Args:
        root: The root of the file system, for tests.

    Returns:
        The number since the control group was made, or since the node booted; None if the kernel does not say.
    """
    for path in (*_files(root), root / "proc/vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        # "oom_kill" in memory.events (cgroup-v2.html), memory.oom_control (v1, since Linux 4.13) and vmstat.
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts and counts[0].isdigit():
            return int(counts[0])
    return None


def resident(pid: int, root: Path = _ROOT) -> int:
    """Return the bytes of memory that a process has in RAM; 0 if it has ended."""
    try:
        lines = (root / f"proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    # proc_pid_status(5)
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(sizes[0]) * 1024 if sizes else 0


def _files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = []
    for line in lines:
        # cgroups(7): hierarchy, controllers, path; the hierarchy of version 2 has number 0 and names no controllers.
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths.append(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            paths.append(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    return paths


_EXCUSED = 2
"""Rounds in which an agent does not charge the fault of its node: one that goes on failing has to end the run."""


class AttributionFeature(Feature):
    """Attributes the failures of workers; it has to know which of them hung.

    Args:
        compare: True if the run ends when it fails in the same way twice in a row.
        kills: Returns the number of processes that the kernel has killed for lack of memory; None if unknown.
    """

    def __init__(self, *, compare: bool = True, kills: Callable[[], int | None] = memory_kills) -> None:
        self._compare, self._kills = compare, kills
        self._before: int | None = None
        self._excused: set[int] = set()
        self._running: RunningRound | None = None

    def workers_started(self, running: RunningRound) -> None:
        """See base class."""
        self._running, self._before = running, self._kills()

    def attribute(self, failure: WorkerFailure, pid: int) -> WorkerFailure:
        """See base class."""
        if failure.exit_code == -signal.SIGKILL and not failure.hung and self._killed_by_kernel():
            cause_text = f"{BY_KERNEL}out of memory on {failure.node}{self._who_has_memory()}"
            failure = replace(failure, message="\n".join(filter(None, (cause_text, failure.message))))
            text = failure.message
        else:
            # The message may lack the line that tells.
            text = failure.message if failure.hung else words(failure.error_file, failure.log) or failure.message
        # Whether it is aborted is chance: the exception is the cause.
        code = 1 if aborted_at_exit(text, failure.exit_code, failure.error_file) else failure.exit_code
        attribution, where = attribute(text, code), self._position(pid)
        same = fingerprint(attribution, text, code, where) if self._compare else ""
        excused = self._is_excused(attribution)
        cause_text = (
            f"not charged to the script, {len(self._excused)} of {_EXCUSED} for {failure.node}" if excused else ""
        )
        return replace(
            failure,
            cause=attribution.cause.name,
            domain=attribution.cause.domain.value,
            outlook=attribution.cause.outlook.value,
            error="" if failure.hung or text.startswith(BY_KERNEL) else named_error(text),
            detail="; ".join(filter(None, (attribution.detail, cause_text))),
            uncharged=failure.uncharged or excused,
            consequence=attribution.cause.consequence,
            timed_out=attribution.cause.name == "collective_timeout",
            where=where or "",
            fingerprint=same,
        )

    def _is_excused(self, attribution: Attribution) -> bool:
        """Return True if this is the node's fault, and the node has not had too many rounds with one."""
        row, running = attribution.cause, self._running
        if running is None or row.domain is not Domain.NODE or row.outlook is not Outlook.ELSEWHERE:
            return False
        if len(self._excused) < _EXCUSED:
            self._excused.add(running.assignment.round)
        return running.assignment.round in self._excused

    def _position(self, pid: int) -> str | None:
        running = self._running
        if running is None:
            return None
        ranks = {process_id: local for local, process_id in running.pids.items()}
        worker = next(
            (worker_progress for worker_progress in running.progress() if worker_progress.local_rank == ranks.get(pid)),
            None,
        )
        if worker is None:
            return None
        return position(reports=worker.attached, calls=worker.boundary, step=worker.step)

    def _killed_by_kernel(self) -> bool:
        now = self._kills()
        return self._before is not None and now is not None and now > self._before

    def _who_has_memory(self) -> str:
        """Return how much memory the other workers of this node have at this moment."""
        running = self._running
        if running is None:
            return ""
        base = running.assignment.place.base_rank
        sizes = ((base + local, resident(pid)) for local, pid in sorted(running.pids.items()))
        sizes_text = [f"rank {rank} has {size_text(size)}" for rank, size in sizes if size]
        return f"; {', '.join(sizes_text)}" if sizes_text else ""
