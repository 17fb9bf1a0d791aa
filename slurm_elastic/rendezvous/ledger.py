"""What a leader writes down for good before it tells anybody: rounds and the end of the run.

The seam behind which the durable store can change.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from slurm_elastic.rendezvous.membership import Finish, Outcome, Table
from slurm_elastic.rundir import RunDir

__all__ = ["Ledger", "RunDirLedger"]


class Ledger(Protocol):
    """Durable decisions of the run. Methods may block; they are called outside of the leader's event loop."""

    def claim_round(self, table: Table) -> bool:
        """Write a round down; False if this round was published by somebody else: the caller is superseded."""

    def finish(self, finish: Finish) -> None:
        """Write down that the run has ended, before anybody is told."""


class RunDirLedger:
    """Keeps rounds and DONE in the run directory.

    Only success makes the run DONE: after a failure a person may mend the script and submit the run again.
    """

    def __init__(self, run_dir: RunDir, epoch: int) -> None:
        self._run_dir = run_dir
        self._epoch = epoch

    def claim_round(self, table: Table) -> bool:
        """See :class:`Ledger`."""
        record = {"epoch": self._epoch, **msgspec.to_builtins(table)}
        return self._run_dir.claim_round(table.round, msgspec.json.encode(record))

    def finish(self, finish: Finish) -> None:
        """See :class:`Ledger`."""
        if finish.outcome is Outcome.SUCCEEDED:
            record = msgspec.to_builtins(dataclasses.replace(finish, agents=()))
            self._run_dir.mark_done({"epoch": self._epoch, **record})
