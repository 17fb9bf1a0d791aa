"""The truth about who trains and who leads, and what must hold of it all the while.

Whatever can only change when somebody starts workers is looked at then, and whatever has to be over by some moment is
looked at in that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership import Table
from tests.simulation.checks import Violation

if TYPE_CHECKING:
    from tests.simulation.succession.leading import Leading
    from tests.simulation.succession.party import Party
    from tests.simulation.succession.world import World

__all__ = ["Checks"]

BOUND = 4.5
"""Seconds after which workers of a round that was followed must have ended."""


class Checks:
    """What was told, started and claimed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.told: dict[int, Table] = {}
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
        self._check_majority(leading, table)

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
        # Whoever was paused has its time from then on.
        if party.workers != number or not party.alive or party.paused:
            return
        due = party.awake_since + BOUND
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
