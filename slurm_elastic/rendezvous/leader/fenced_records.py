"""The records of one leader, written before it tells anybody: its epoch, rounds and the end of the run.

The order in which that is done matters: see :mod:`slurm_elastic.rendezvous.election.term`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.membership import Base, Finish, Outcome, Table
from slurm_elastic.rendezvous.records.api import Record, Records, Situation

__all__ = ["FencedRecords", "LastRound", "last_failure", "last_round", "newest_endpoint"]


@dataclasses.dataclass(frozen=True, slots=True)
class LastRound:
    """The newest round on record.

    Attributes:
        round: its number.
        base: who was in it; None if it belongs to another incarnation, of which nobody is left.
        restarts: worker failures charged until then.
        successors: where its members listen, by rank.
        failure: fingerprint of the last one that was charged, also to an earlier incarnation; empty for none.
    """

    round: int
    base: Base | None
    restarts: int
    successors: tuple[Successor, ...]
    failure: str = ""


def last_round(situation: Situation, scope: str) -> LastRound | None:
    """Return the newest round on record as the agents of a scope see it; None if there is none."""
    number, record = situation.number, situation.round
    if number is None or record is None:
        return None
    failure = last_failure(record)
    if record.get("scope") != scope:
        return LastRound(number, None, 0, (), failure)
    places: list[Mapping[str, Any]] = list(record["places"])
    base = Base(
        number,
        tuple(str(place["agent"]) for place in places),
        tuple(str(place["node"]) for place in places),
        str(record["leader"]),
        float(record.get("heartbeat_limit", 0.0)),
        str(record.get("origin", "")),
    )
    successors = tuple(
        Successor(str(place["agent"]), str(place["address"]), int(place["standby_port"])) for place in places
    )
    return LastRound(number, base, int(record["restarts"]), successors, failure)


def last_failure(record: Record) -> str:
    """Return the fingerprint that the record of a round has of the failure charged last; empty for none."""
    found = record.get("last_failure")
    return found if isinstance(found, str) else ""


def newest_endpoint(situation: Situation, scope: str) -> Record | None:
    """Return where the newest leader on record of a scope is; None if there is none.

    The endpoint is replaced, not created: a leader that was superseded while it claimed its epoch may say where it is
    after its successor has, and nobody would find that one. Its rounds say where it is, too.
    """
    published, record = situation.endpoint, situation.round
    leading: Record | None = record.get("endpoint") if record is not None and record.get("scope") == scope else None
    if leading is None or (published is not None and published.get("epoch", leading["epoch"]) >= leading["epoch"]):
        return published
    return leading


class FencedRecords:
    """One leader's durable decisions. Methods may block; they are called outside of the leader's event loop.

    Only success makes the run DONE: after a failure a person may mend the script and submit the run again.

    Args:
        records: of the run.
        scope: of the records; rounds on record say to which they belong.
        epoch: of the leader.
        endpoint: what is published once the epoch is claimed: where the leader is.
        follows: the last round that the leader knows of, None for none.
    """

    def __init__(self, records: Records, scope: str, epoch: int, endpoint: Record, follows: int | None) -> None:
        self._records = records
        self._scope = scope
        self._epoch = epoch
        self._endpoint = endpoint
        self._follows = follows

    def claim(self) -> bool:
        """Take the epoch and say where the leader is; False if somebody else leads, or led until now.

        Raises:
            RecordsError: it cannot be written.
        """
        if not (self.take() and self.confirm()):
            return False
        self.publish_endpoint()
        return True

    def take(self) -> bool:
        """Take the epoch: no other leader tells anybody now of a round that is not on record yet."""
        return self._records.claim_epoch(self._epoch, {"agent": self._endpoint["agent"]})

    def confirm(self) -> bool:
        """Return whether no round was written since the leader looked; to be asked once it has the epoch."""
        return self._records.last_round() == self._follows

    def publish_endpoint(self) -> None:
        """Say where the leader is."""
        self._records.publish_endpoint(self._endpoint)

    def leads(self) -> bool:
        """Return whether the epoch is the newest.

        Raises:
            RecordsError: nobody can tell.
        """
        return self._records.newest_epoch() == self._epoch

    def write_round(self, table: Table) -> bool:
        """Write a round down, between two looks whether this epoch :meth:`leads`; False if another leader has.

        Raises:
            RecordsError: it cannot be written.
        """
        record = {
            "epoch": self._epoch,
            "scope": self._scope,
            "leader": self._endpoint["agent"],
            "endpoint": self._endpoint,
            **msgspec.to_builtins(table),
        }
        return self._records.claim_round(table.round, record)

    def finish(self, finish: Finish) -> bool:
        """Write down that the run has ended, before anybody is told; False if somebody else leads by now.

        Raises:
            RecordsError: it cannot be written.
        """
        # A round that ended well is over whoever leads. So this last look waits for no store that is silent.
        if self._records.newest_epoch(patient=False) != self._epoch:
            return False
        if finish.outcome is Outcome.SUCCEEDED:
            record = msgspec.to_builtins(dataclasses.replace(finish, agents=()))
            self._records.mark_done({"epoch": self._epoch, **record})
        return True
