"""The records of one scope, each operation atomic: what the run directory and etcd promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurm_elastic.rendezvous.records.api import Record, Situation


class Records:
    """Epochs and rounds on record, and in which order they were written down.

    Attributes:
        order: what was written down, one after the other: ("epoch", 1), ("round", 0), ...
    """

    def __init__(self) -> None:
        self.epochs: dict[int, Record] = {}
        self.rounds: dict[int, Record] = {}
        self.published: Record | None = None
        self.order: list[tuple[str, int]] = []

    def newest_epoch(self, *, can_wait: bool = True) -> int | None:
        return max(self.epochs, default=None)

    def claim_epoch(self, number: int, record: Record) -> bool:
        return self._claim("epoch", self.epochs, number, record)

    def epoch(self, number: int) -> Record | None:
        return self.epochs.get(number)

    def publish_endpoint(self, record: Record) -> None:
        self.published = record

    def endpoint(self) -> Record | None:
        return self.published

    def claim_round(self, number: int, record: Record) -> bool:
        return self._claim("round", self.rounds, number, record)

    def last_round(self) -> int | None:
        return max(self.rounds, default=None)

    def round(self, number: int) -> Record | None:
        return self.rounds.get(number)

    def situation(self, known: int | None = None) -> Situation:
        number = self.last_round()
        return Situation(self.published, number, None if number is None or number == known else self.rounds[number])

    def mark_done(self, record: Record) -> bool:
        raise NotImplementedError

    def is_done(self) -> bool:
        return False

    def publish_failure(self, record: Record) -> None:
        raise NotImplementedError

    def failure(self) -> Record | None:
        return None

    def on_loss(self, tell: Callable[[Any], None]) -> None:
        pass

    def stop_waiting(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _claim(self, kind: str, written: dict[int, Record], number: int, record: Record) -> bool:
        if number in written:
            return False
        written[number] = record
        self.order.append((kind, number))
        return True
