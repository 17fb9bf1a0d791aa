"""The durable records of one scope of a run: epochs, the leader's endpoint, rounds, and the end.

What is written here holds whoever is asked and whoever dies: it is what fences a superseded leader. The run directory
keeps them unless the run has an external store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from slurm_elastic.errors import ExitCode, SlurmElasticError
from slurm_elastic.rundir import RecordError, RunDir, RunDirError

__all__ = [
    "Record",
    "Records",
    "RecordsError",
    "RecordsInterruptedError",
    "RecordsUnreachableError",
    "RunDirRecords",
    "Situation",
]

Record = Mapping[str, Any]
"""A JSON object; all of its values can be written as JSON."""

_T = TypeVar("_T")


class RecordsError(SlurmElasticError):
    """The records cannot be read or written: the store is full, gone, or holds something else than records.

    A person has to mend it; the message is one line that says what and how. Nothing is known of what a write did.
    """


class RecordsUnreachableError(RecordsError):
    """The store did not answer as long as it was waited for; it may answer later."""

    exit_code = ExitCode.LEFT


class RecordsInterruptedError(RecordsError):
    """A wait for the store was ended by a signal, or by :meth:`Records.stop_waiting`."""

    exit_code = ExitCode.LEFT


@dataclass(frozen=True, slots=True)
class Situation:
    """The records that an agent needs to find the run's leader.

    Attributes:
        endpoint: as of :meth:`Records.endpoint`.
        number: of the highest round written, None before the first.
        round: its record, None if there is none.
    """

    endpoint: Record | None
    number: int | None
    round: Record | None


class Records(Protocol):
    """The records of one scope; see :func:`~slurm_elastic.rundir.incarnation` for what a scope is.

    Epochs, endpoint and failure belong to the scope. Rounds and DONE belong to the run as a whole.

    All methods may block as long as the store takes, so they are called outside of event loops. They are safe among
    threads, processes and nodes, and every one may raise RecordsError.
    """

    def newest_epoch(self, *, patient: bool = True) -> int | None:
        """Return the highest epoch taken, None before the first.

        Args:
            patient: False where nobody may be kept waiting by a store that is silent for a while: what else is known
                counts then.
        """

    def claim_epoch(self, number: int, record: Record) -> bool:
        """Take an epoch. Returns False if somebody else has it."""

    def epoch(self, number: int) -> Record | None:
        """Return the record of an epoch, None if nobody took it."""

    def publish_endpoint(self, record: Record) -> None:
        """Say where the leader is, in place of what was said before."""

    def endpoint(self) -> Record | None:
        """Return what `publish_endpoint` said last, None if it never did."""

    def claim_round(self, number: int, record: Record) -> bool:
        """Write a round down. Returns False if somebody else wrote that one."""

    def last_round(self) -> int | None:
        """Return the highest round written, None before the first."""

    def round(self, number: int) -> Record | None:
        """Return the record of a round, None if there is none."""

    def situation(self) -> Situation:
        """Return where the leader is and the newest round, at the price of one question."""

    def mark_done(self, record: Record) -> bool:
        """Write down that the run is finished. Returns False if that was known; the first record stays."""

    def is_done(self) -> bool:
        """Return whether the run is finished."""

    def publish_failure(self, record: Record) -> None:
        """Say why the run failed in this scope."""

    def failure(self) -> Record | None:
        """Return why the run failed in this scope, None if it did not."""

    def on_loss(self, tell: Callable[[RecordsError], None]) -> None:
        """Have `tell` called once, from any thread, if the store is given up for lost while nobody asks it anything."""

    def stop_waiting(self) -> None:
        """End all waits for the store by RecordsInterruptedError; later calls wait two seconds at most."""

    def close(self) -> None:
        """End what the records need of this process. What was written stays."""


class RunDirRecords:
    """Keeps the records in the run directory.

    Args:
        run_dir: opened.
        scope: whose records these are.
    """

    def __init__(self, run_dir: RunDir, scope: str) -> None:
        self._run_dir = run_dir
        self._scope = scope

    def newest_epoch(self, *, patient: bool = True) -> int | None:
        """See :class:`Records`."""
        return _translated(lambda: self._run_dir.newest_epoch(self._scope))

    def claim_epoch(self, number: int, record: Record) -> bool:
        """See :class:`Records`."""
        return _translated(lambda: self._run_dir.claim_epoch(self._scope, number, _encode(record)))

    def epoch(self, number: int) -> Record | None:
        """See :class:`Records`."""
        return _decode(_translated(lambda: self._run_dir.epoch_record(self._scope, number)))

    def publish_endpoint(self, record: Record) -> None:
        """See :class:`Records`."""
        _translated(lambda: self._run_dir.publish_endpoint(self._scope, _encode(record)))

    def endpoint(self) -> Record | None:
        """See :class:`Records`. One that was cut short, as by a power loss of the file server, says nothing."""
        try:
            return _decode(self._run_dir.endpoint(self._scope))
        except RecordError:
            return None
        except RunDirError as error:
            raise RecordsError(str(error)) from error

    def claim_round(self, number: int, record: Record) -> bool:
        """See :class:`Records`."""
        return _translated(lambda: self._run_dir.claim_round(number, _encode(record)))

    def last_round(self) -> int | None:
        """See :class:`Records`."""
        return _translated(self._run_dir.last_round)

    def round(self, number: int) -> Record | None:
        """See :class:`Records`."""
        return _decode(_translated(lambda: self._run_dir.round_record(number)))

    def situation(self) -> Situation:
        """See :class:`Records`."""
        endpoint, number = self.endpoint(), self.last_round()
        return Situation(endpoint, number, None if number is None else self.round(number))

    def mark_done(self, record: Record) -> bool:
        """See :class:`Records`."""
        return _translated(lambda: self._run_dir.mark_done(record))

    def is_done(self) -> bool:
        """See :class:`Records`."""
        return _translated(self._run_dir.is_done)

    def publish_failure(self, record: Record) -> None:
        """See :class:`Records`."""
        _translated(lambda: self._run_dir.publish_failure(self._scope, _encode(record)))

    def failure(self) -> Record | None:
        """See :class:`Records`."""
        return _decode(_translated(lambda: self._run_dir.failure(self._scope)))

    def on_loss(self, tell: Callable[[RecordsError], None]) -> None:
        """See :class:`Records`. A file system that fails is noticed by whoever uses it."""

    def stop_waiting(self) -> None:
        """See :class:`Records`. Nothing can end a wait for a file system."""

    def close(self) -> None:
        """See :class:`Records`."""


def _encode(record: Record) -> bytes:
    return json.dumps(record).encode()


def _decode(content: bytes | None) -> Record | None:
    # The run directory has made sure that it is one JSON object.
    return None if content is None else json.loads(content)


def _translated(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except RunDirError as error:
        raise RecordsError(str(error)) from error
