"""The records of one scope, each operation atomic: what the run directory and etcd promise."""

from __future__ import annotations

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

    def claim_round(self, number: int, record: Record) -> bool:
        return self._claim("round", self.rounds, number, record)

    def last_round(self) -> int | None:
        return max(self.rounds, default=None)

    def round(self, number: int) -> Record | None:
        return self.rounds.get(number)

    def situation(self, known: int | None = None) -> Situation:
        number = self.last_round()
        return Situation(self.published, number, None if number is None or number == known else self.rounds[number])

    def _claim(self, kind: str, written: dict[int, Record], number: int, record: Record) -> bool:
        if number in written:
            return False
        written[number] = record
        self.order.append((kind, number))
        return True
