"""A feature of the agent: says what the failure of a worker is, as the registry of failures knows it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from slurm_elastic.agent.features import Feature, RunningRound
from slurm_elastic.agent.memory_kills import memory_kills, resident
from slurm_elastic.agent.root_cause import aborted_at_exit, named_error, words
from slurm_elastic.failures import (
    BY_KERNEL,
    Attribution,
    Domain,
    Outlook,
    attribute,
    fingerprint,
    position,
)
from slurm_elastic.rendezvous.membership import WorkerFailure
from slurm_elastic.text import size_text

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
