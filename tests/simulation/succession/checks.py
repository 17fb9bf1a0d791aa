"""The truth about who trains and who leads, and what must hold of it all the while.

Whatever can only change when somebody starts workers is looked at then, and whatever has to be over by some moment is
looked at in that moment.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.election.policy import FENCE, default_leader_limit
from slurm_elastic.rendezvous.membership import Reason, Table
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.succession.leading import Leading
    from tests.simulation.succession.party import Party
    from tests.simulation.succession.world import World

__all__ = ["Checks"]

BOUND = 4.5
"""Seconds after which workers of a round that was followed must have ended: a leader that was paused has that long to
find out that it has lost its majority, and its own workers half a second more."""
RESTORE = 0.1
"""Seconds in which a broken link may be restored before workers are stopped."""
STOP = 0.5
"""Seconds in which workers are stopped, at most."""
NAP = 0.07
"""Seconds by which an agent looks at its clock late, at most."""
LATE = 1.2
"""Seconds by which a message and its answer are late, at most."""


class Checks:
    """What was told, started and claimed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.told: dict[int, Table] = {}
        self.failures = 0
        self._led_since: dict[int, float] = {}
        self._started_at: dict[int, float] = {}

    def after_claim(self, leading: Leading) -> None:
        """A leader has its epoch, and has looked at the last round."""
        base = leading.state.base
        unknown = [number for number in self.told if base is None or number > base.round]
        if unknown:
            raise Violation("a new leader knows every round", f"epoch {leading.epoch} follows {base}, not {unknown}")

    def after_publish(self, leading: Leading, table: Table) -> None:
        """A leader tells its members of a round."""
        known = self.told.setdefault(table.round, table)
        if known is not table:
            raise Violation("a round is told once", f"round {table.round}: {known} and {table}")
        order = self._world.records.order
        newer = [number for kind, number in order[: order.index(("round", table.round))] if kind == "epoch"]
        if any(number > leading.epoch for number in newer):
            raise Violation("a superseded leader publishes nothing", f"round {table.round} of epoch {leading.epoch}")
        self._led_since.setdefault(leading.epoch, self._world.now)
        self._check_charges(table)
        self._check_majority(leading, table)

    def _check_charges(self, table: Table) -> None:
        """Each failure is charged at most once, and what any member was told of is not forgotten."""
        known = max(self._world.parties[place.agent].participant.restarts for place in table.places)
        if not known <= table.restarts <= self.failures:
            detail = f"round {table.round} counts {table.restarts}, members {known}; {self.failures} failures"
            raise Violation("restarts are one number for the run", detail)
        if table.reason is Reason.WORKER_FAILED and not self.failures:
            raise Violation("what is said of a round is true", f"round {table.round}: no worker has failed")

    def after_take(self, leading: Leading) -> None:
        """An agent has taken an epoch: the leader before was lost, let go, or could not be heard for long enough.

        Whoever stood before that leader had told anybody of a round may not have found it.
        """
        record = self._world.records.epoch(leading.epoch - 1)
        if record is None or leading.stood_at < self._led_since.get(leading.epoch - 1, math.inf) + LATE:
            return
        last = self._world.parties[str(record["agent"])]
        well = last.alive and not last.leaving and last.leading is not None and last.leading.epoch == leading.epoch - 1
        limit = self._world.limit
        enough = default_leader_limit(limit) - limit / 3 - LATE
        if well and self._world.longest_silence() < enough:
            raise Violation("a leader that is well is not followed", f"epoch {leading.epoch} of {leading.party.name}")

    def after_look(self, party: Party) -> None:
        """An agent has looked at its clock."""
        if party.workers is None:
            return
        lost = party.heard_at + FENCE * self._world.limit + RESTORE + NAP
        if party.wire is None:
            lost = min(lost, party.search.began + RESTORE)
        if self._world.now > max(lost, party.awake_since + RESTORE) + STOP + 3 * NAP:
            raise Violation("who hears no leader stops by itself", f"{party.name} has workers of {party.workers}")

    def _check_majority(self, leading: Leading, table: Table) -> None:
        """A round holds the greater part of those members of the last one that live and are not about to go."""
        before = self._world.records.round(table.round - 1)
        if before is None:
            return
        members = [str(place["agent"]) for place in before["places"]]
        parties = self._world.parties
        living = [name for name in members if parties[name].alive and not parties[name].leaving]
        here = {place.agent for place in table.places}.intersection(members)
        if 2 * len(here) < len(living):
            raise Violation("a majority goes on", f"round {table.round} has {sorted(here)}, {living} live")
        if living and 2 * len(here) == len(living):
            leader = str(before["leader"])
            decides = leader if parties[leader].alive and not parties[leader].leaving else living[0]
            if here.isdisjoint({leader, decides}) and leading.party.name not in (leader, decides):
                raise Violation("of two halves one goes on", f"round {table.round} has {sorted(here)}, {living} live")

    def after_start(self, party: Party, table: Table) -> None:
        """An agent starts workers; only now a round can become whole."""
        self._world.tell(party.name, f"starts workers of round {table.round}: {[p.agent for p in table.places]}")
        if self.told.get(table.round) != table:
            raise Violation("a table never changes", str(table))
        rounds = {each.workers for each in self._world.parties.values() if each.workers is not None}
        whole = [number for number in sorted(rounds) if self._is_whole(number)]
        if len(whole) > 1:
            raise Violation("one group trains", f"rounds {whole} are whole")
        if table.round not in self._started_at:
            self._started_at[table.round] = self._world.now
            for each in self._world.parties.values():
                self._must_end(each, table.round)
        newer = [number for number in self._started_at if number > table.round]
        if newer:
            self._must_end(party, min(newer))

    def _must_end(self, party: Party, follower: int) -> None:
        """Workers of a round before this one, which has started, end within their time."""
        if party.workers is not None and party.workers < follower:
            due = max(self._started_at[follower] + BOUND, self._world.now)
            self._world.at(due, self._check_ended, party, party.workers)

    def _check_ended(self, party: Party, number: int) -> None:
        # Whoever was paused has its time from then on; and what a leader says waits for what it writes down.
        if party.workers != number or not party.alive or party.paused:
            return
        due = max(party.awake_since, self._world.slow_until) + BOUND
        if self._world.now < due:
            self._world.at(due, self._check_ended, party, number)
        else:
            raise Violation("old workers end in time", f"{party.name} has workers of round {number}")

    def after_pause(self, party: Party) -> None:
        """An agent goes on that was paused."""
        newer = [number for number in self._started_at if party.workers is not None and number > party.workers]
        if newer:
            self._world.at(self._world.now + BOUND, self._check_ended, party, party.workers)

    def _is_whole(self, number: int) -> bool:
        """Whether a round can take a step: that takes the workers of all its members."""
        parties = self._world.parties
        return all(
            (party := parties[place.agent]).alive and party.workers == number for place in self.told[number].places
        )
