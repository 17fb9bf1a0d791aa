"""What a leader writes down for good before it tells anybody: rounds and the end of the run."""

from __future__ import annotations

import dataclasses

import msgspec

from slurm_elastic.rendezvous.membership import Finish, Outcome, Table
from slurm_elastic.rendezvous.records import Records

__all__ = ["Ledger"]


class Ledger:
    """One leader's durable decisions. Methods may block; they are called outside of the leader's event loop.

    Only success makes the run DONE: after a failure a person may mend the script and submit the run again.

    Args:
        records: of the run.
        epoch: of the leader.
    """

    def __init__(self, records: Records, epoch: int) -> None:
        self._records = records
        self._epoch = epoch

    def claim_round(self, table: Table) -> bool:
        """Write a round down; False if this round was published by somebody else: the caller is superseded.

        Raises:
            RecordsError: it cannot be written.
        """
        return self._records.claim_round(table.round, {"epoch": self._epoch, **msgspec.to_builtins(table)})

    def finish(self, finish: Finish) -> None:
        """Write down that the run has ended, before anybody is told.

        Raises:
            RecordsError: it cannot be written.
        """
        if finish.outcome is Outcome.SUCCEEDED:
            record = msgspec.to_builtins(dataclasses.replace(finish, agents=()))
            self._records.mark_done({"epoch": self._epoch, **record})
