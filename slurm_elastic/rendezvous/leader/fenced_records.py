"""The records that a leader writes before it tells any agent: its epoch, rounds and the end of the run.

Their order matters: see :mod:`slurm_elastic.rendezvous.election.term`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.config import Base
from slurm_elastic.rendezvous.membership.events import Finish, Outcome
from slurm_elastic.rendezvous.records.api import Record, Records, Situation
from slurm_elastic.rendezvous.transport.messages import Successor

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LastRound:
    """The newest round on record.

    Attributes:
        base: Its members; None if it belongs to another incarnation, of which no agent is left.
        successors: The members with their endpoints, by rank.
        failure: Fingerprint of the last failure that was charged, also to an earlier incarnation; empty for none.
        ran: The numbers of nodes that have worked, also in an earlier incarnation, with seconds.
    """

    round: int
    base: Base | None
    restarts: int
    successors: tuple[Successor, ...]
    failure: str = ""
    ran: tuple[tuple[int, float], ...] = ()
    unusable: tuple[int, ...] = ()


def last_round(situation: Situation, incarnation: str) -> LastRound | None:
    """Return the newest round on record as the agents of an incarnation see it; None if there is none."""
    number, record = situation.number, situation.round
    if number is None or record is None:
        return None
    failure = str(record.get("last_failure", ""))
    ran = tuple((int(size), float(seconds)) for size, seconds in record.get("ran", ()))
    if record.get("scope") != incarnation:
        # A person may have changed the script meanwhile: what it could not use is tried again.
        return LastRound(number, None, 0, (), failure, ran)
    places: list[Mapping[str, Any]] = list(record["places"])
    base = Base(
        number,
        tuple(str(place["agent"]) for place in places),
        str(record["leader"]),
        float(record.get("heartbeat_limit", 0.0)),
        str(record.get("origin", "")),
    )
    successors = tuple(
        Successor(str(place["agent"]), str(place["address"]), int(place["standby_port"])) for place in places
    )
    unusable = tuple(map(int, record.get("unusable", ())))
    return LastRound(number, base, int(record["restarts"]), successors, failure, ran, unusable)


def newest_endpoint(situation: Situation, incarnation: str) -> Record | None:
    """Return the endpoint of the newest leader on record of an incarnation; None if there is none.

    Leaders replace the record of the endpoint: one that was superseded while it claimed its epoch may publish after its
    successor, and no agent would find the successor. So the records of rounds have the endpoint, too.
    """
    return newer_endpoint(situation.endpoint, round_endpoint(situation.round, incarnation))


def round_endpoint(record: Record | None, incarnation: str) -> Record | None:
    """Return the endpoint of the leader that wrote the record of a round; None if it is of another incarnation."""
    return record.get("endpoint") if record is not None and record.get("scope") == incarnation else None


def newer_endpoint(published: Record | None, leading: Record | None) -> Record | None:
    """Return the endpoint of the newer leader: the one that is published, or that in the record of the newest round."""
    if leading is None or (published is not None and published.get("epoch", leading["epoch"]) >= leading["epoch"]):
        return published
    return leading


class FencedRecords:
    """The durable decisions of one leader. Methods may block; the leader calls them outside of its event loop.

    Only success makes the run DONE: after a failure a person may fix the script and submit the run again.

    Every method may raise RecordsError if the records do not answer or cannot be written.

    Args:
        endpoint: Address and port of the leader, and its agent; published once the epoch is claimed.
        follows: Number of the last round that the leader knows of; None for none.
    """

    def __init__(self, records: Records, incarnation: str, epoch: int, endpoint: Record, follows: int | None) -> None:
        self._records = records
        self._incarnation = incarnation
        self._epoch = epoch
        self._endpoint = endpoint
        self._follows = follows

    def claim(self) -> bool:
        """Take the epoch and publish the endpoint; return False if another agent leads, or led until now."""
        if not (self.take() and self.confirm()):
            return False
        self.publish_endpoint()
        return True

    def take(self) -> bool:
        """Take the epoch; from now on no other leader publishes a round that is not on record yet."""
        return self._records.claim_epoch(self._epoch, {"agent": self._endpoint["agent"]})

    def confirm(self) -> bool:
        """Return True if no leader has written a round that this one does not know. Call it after `take`."""
        return self._records.last_round() == self._follows

    def publish_endpoint(self) -> None:
        """Publish the address and port of the leader."""
        self._records.publish_endpoint(self._endpoint)

    def leads(self) -> bool:
        """Return True if the epoch is the newest."""
        return self._records.newest_epoch() == self._epoch

    def write_round(self, table: Table) -> bool:
        """Write the record of a round; return False if another leader has written it.

        The caller checks before and after this call that the epoch :meth:`leads`.
        """
        record = {
            "epoch": self._epoch,
            "scope": self._incarnation,
            "leader": self._endpoint["agent"],
            "endpoint": self._endpoint,
            **msgspec.to_builtins(table),
        }
        return self._records.claim_round(table.round, record)

    def finish(self, finish: Finish) -> bool:
        """Write down that the run has ended, before any agent is told; return False if another agent leads by now."""
        # A round that ended well is over under any leader. So this check does not wait for an etcd that is silent.
        if self._records.newest_epoch(can_wait=False) != self._epoch:
            return False
        if finish.message.outcome is Outcome.SUCCEEDED:
            self._records.mark_done({"epoch": self._epoch, **msgspec.to_builtins(finish.message)})
        elif finish.message.failure is not None:
            # A full disk may be why the run has failed. The agents are told all the same.
            try:
                self._records.publish_failure(msgspec.to_builtins(finish.message.failure))
            except RecordsError as error:
                logger.warning("why the run failed is not written down: %s", error)
        return True
