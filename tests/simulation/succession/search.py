"""How an agent in virtual time finds its leader, or stands up itself: as in the product's member and seat.

The rules themselves are the product's (slurm_elastic/rendezvous/election/policy.py); what is modelled here is
who asks whom, and when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.election.policy import IN_THE_WAY, default_leader_limit, newest_order, patience
from slurm_elastic.rendezvous.leader.fenced_records import Ledger, last_round, newest_endpoint
from slurm_elastic.rendezvous.membership import Reason, Settings, in_the_way
from slurm_elastic.rendezvous.records.api import Situation
from tests.simulation.succession.checks import RESTORE
from tests.simulation.succession.leading import Leading, Placed
from tests.simulation.succession.wire import Wire

if TYPE_CHECKING:
    from tests.simulation.succession.party import Party

__all__ = ["SCOPE", "Search"]

SCOPE = "run.0"
UNLED = 10.0
"""Seconds after which a run that nobody has ever led is led by whoever is there."""
READ_AGAIN = 0.5
"""Seconds between two looks at the records, and of a candidate for another."""
STAND_BACK = 3.0
"""Seconds in which an agent does not stand up again after it found somebody else."""


class Search:
    """What an agent knows of leaders, and its way to the next one.

    Attributes:
        resigned: whether the last leader has said that it goes.
        leaving: agents that have said that they go, this one too: they do not stand.
        began: since when there is no link to a leader; counts while there is none.
    """

    def __init__(self, party: Party) -> None:
        self.party, self.world = party, party.world
        self.resigned = False
        self._epoch = 0
        self._leader = self._left = ""
        self.leaving: set[str] = set()
        self._gone: frozenset[str] = frozenset()
        self._told: list[str] = []
        self._told_in = -1
        # One search.
        self._again = False
        self.began = self.world.now
        self._lost_at: float | None = None
        self._answers: dict[str, str] = {}
        self._trying: dict[str, float] = {}
        self._seen = Situation(None, None, None)
        self._seen_at = -math.inf
        self._reading = False
        self._stand_again_at = 0.0
        self.rivals_at = 0.0
        self._in_the_way_since = math.inf

    def placed(self, message: Placed) -> None:
        """Note who leads, and who may next."""
        self._epoch, self._leader = message.epoch, message.leader
        self._told = [place.agent for place in message.table.places if place.agent != message.leader]
        self._told_in = message.table.round
        self.leaving, self._gone = set(), frozenset()

    def resign(self, leader: str, gone: frozenset[str]) -> None:
        """The leader goes."""
        self.resigned, self._left = True, leader
        self._gone |= gone

    def begin(self) -> None:
        """The link to the last leader is of no more use."""
        self.began, self._again, self._answers, self._trying = self.world.now, True, {}, {}
        self._seen, self._seen_at = Situation(None, None, None), -math.inf
        self._lost_at = self.world.now if self.resigned else None

    def is_late(self) -> bool:
        """Whether a broken link is not restored soon enough."""
        return self._again and self.world.now >= self.began + RESTORE

    def look(self) -> None:
        """Ask where a leader may be; stand up if there is none for long enough."""
        now, party = self.world.now, self.party
        self._read()
        place, order = self._place(), self._order()
        if self._lost_at is None:
            self._lost_at = self._when_lost(place)
        if party.leading is not None:
            places = [party.name]
        else:
            places = [name for name in (self._leader if self._again else "", place) if name and name != self._left]
            if self._lost_at is not None or now > self.began + RESTORE:
                places += [name for name in order if name != party.name]
        for name in dict.fromkeys(places):
            if now >= self._trying.get(name, 0.0):
                self._trying[name] = now + 60.0
                self.world.attempt(party, name, lambda answer, wire, name=name: self._answered(name, answer, wire))
        # Somebody may lead since an earlier look.
        if self._lost_at is None or self._seen_at < self._lost_at:
            return
        gone = {name for name, answer in self._answers.items() if answer == "ended"} | self._gone
        if now >= self._lost_at + patience(order, party.name, gone, self.leaving):
            if self.resigned:
                gone.add(self._left)
            self._stand(gone)

    def look_for_rivals(self) -> None:
        """While this agent stands without an epoch: find out whether somebody else leads, or should."""
        self.rivals_at = self.world.now + READ_AGAIN
        leading = self.party.leading
        if leading is None or not in_the_way(leading.state):
            self._in_the_way_since = math.inf
        else:
            self._in_the_way_since = min(self._in_the_way_since, self.world.now)
            if self.world.now >= self._in_the_way_since + IN_THE_WAY:
                self._stand_down("the members of the last round")
                return
        self._read()
        order, own = self._order(), self.party.name
        ahead = order[: order.index(own)] if own in order else order
        for name in dict.fromkeys([self._place(), *ahead, self._leader]):
            if name not in ("", own, self._left):
                self.world.attempt(self.party, name, self._found_rival)

    def lead(self, gone: set[str], reason: Reason) -> None:
        """Stand, and collect joins."""
        records, party = self.world.records, self.party
        epoch = (records.newest_epoch() or 0) + 1
        last = last_round(records.situation(), SCOPE)
        settings = Settings(
            min_nodes=1,
            max_nodes=16,
            max_restarts=16,
            agent=party.name,
            first_round=0 if last is None else last.round + 1,
            first_reason=reason,
            first_restarts=last.restarts if last is not None else 0,
            base=last.base if last is not None else None,
            gone=frozenset(gone),
            on_tie=party.on_tie,
            claimed=False,
            join_timeout=1000.0,
            heartbeat_limit=self.world.limit,
        )
        endpoint = {"agent": party.name, "epoch": epoch}
        ledger = Ledger(records, SCOPE, epoch, endpoint, last.round if last is not None else None)
        party.leading = Leading(self.world, party, epoch, settings, ledger)
        party.wake_at(self.world.now)

    def _read(self) -> None:
        """Look at the records; that takes its time, and nobody waits for it."""
        began, needed = self.world.now, -math.inf if self._lost_at is None else self._lost_at
        if self._reading or (began < self._seen_at + READ_AGAIN and self._seen_at >= needed):
            return
        self._reading = True

        def happen() -> None:
            situation = self.world.records.situation()
            self.party.later(self.world.disk(), lambda: know(situation))

        def know(situation: Situation) -> None:
            self._seen, self._seen_at, self._reading = situation, began, False

        self.world.at(self.world.now + self.world.disk(), happen)

    def _place(self) -> str:
        """Where a leader is, by the records."""
        endpoint = newest_endpoint(self._seen, SCOPE)
        return str(endpoint["agent"]) if endpoint is not None else ""

    def _order(self) -> Sequence[str]:
        """Who may lead next."""
        if self._seen.round is None or self._seen.number is None:
            return self._told
        recorded = [str(place["agent"]) for place in self._seen.round["places"]]
        return newest_order(self._told, self._told_in, recorded, self._seen.number)

    def _when_lost(self, place: str) -> float | None:
        """Since when it is certain that there is no leader where there was one."""
        now, limit = self.world.now, default_leader_limit(self.world.limit)
        lost = {name for name, answer in self._answers.items() if answer in ("ended", "idle")}
        if self._again:
            return now if self._leader in lost or now > self.party.heard_at + limit else None
        if not place:
            return now if now > self.began + UNLED else None
        return now if place in lost or now > self.began + limit else None

    def _answered(self, name: str, answer: str, wire: Wire | None) -> None:
        self._answers[name] = answer
        self._trying[name] = self.world.now + (0.03 if answer == "idle" else 0.3)
        if wire is None:
            return
        if self.party.wire is not None or wire.lost or wire.epoch < self._epoch or wire.leader.leading is None:
            wire.close_by_member()
        else:
            leading = self.party.leading
            if leading is not None and not leading.state.claimed and wire.leader is not self.party:
                self._stand_down(wire.leader.name)
            self.party.use(wire)

    def _stand(self, gone: set[str]) -> None:
        party = self.party
        if party.leading is not None or party.leaving or self.world.now < self._stand_again_at:
            return
        self._stand_again_at = self.world.now + 1.0
        reason = Reason.NODE_LEFT if self.resigned else Reason.NODE_LOST

        def stand() -> None:
            if party.leading is None and party.wire is None:
                self.world.tell(party.name, "stands")
                self.lead(gone, reason)

        party.later(self.world.disk(), stand)

    def _found_rival(self, answer: str, wire: Wire | None) -> None:
        if wire is None:
            return
        wire.close_by_member()
        leading = self.party.leading
        if leading is not None and not leading.state.claimed and wire.leader.leading is not None:
            self._stand_down(wire.leader.name)

    def _stand_down(self, whom: str) -> None:
        self.world.tell(self.party.name, f"stands down for {whom}")
        self._stand_again_at = self.world.now + STAND_BACK
        self._in_the_way_since = math.inf
        if self.party.leading is not None:
            self.party.leading.end()
