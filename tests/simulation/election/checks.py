"""The truth about who trains and who leads, and what must hold of it all the while.

Whatever can only change when somebody starts workers is looked at then, and whatever has to be over by some moment is
looked at in that moment.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.election.campaign import FENCE, default_leader_limit
from slurm_elastic.rendezvous.membership.agents import Reason
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.transport.messages import Assignment
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.election.agent import Agent
    from tests.simulation.election.leader import Leader
    from tests.simulation.election.world import World

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
        self._told_by: dict[int, int] = {}
        self._led_since: dict[int, float] = {}
        self._started_at: dict[int, float] = {}

    def after_claim(self, leader: Leader) -> None:
        """A leader has its epoch, and has looked at the last round; another may follow it already."""
        base = leader.state.base
        last = -1 if base is None else base.round
        unknown = [number for number, epoch in self._told_by.items() if number > last and epoch < leader.epoch]
        if unknown:
            raise Violation("a new leader knows every round", f"epoch {leader.epoch} follows {base}, not {unknown}")

    def after_publish(self, leader: Leader, table: Table) -> None:
        """A leader tells its members of a round."""
        known = self.told.setdefault(table.round, table)
        self._told_by.setdefault(table.round, leader.epoch)
        if known is not table:
            raise Violation("a round is told once", f"round {table.round}: {known} and {table}")
        order = self._world.records.order
        newer = [number for kind, number in order[: order.index(("round", table.round))] if kind == "epoch"]
        if any(number > leader.epoch for number in newer):
            raise Violation("a superseded leader publishes nothing", f"round {table.round} of epoch {leader.epoch}")
        self._led_since.setdefault(leader.epoch, self._world.now)
        self._check_charges(table)
        self._check_majority(leader, table)

    def _check_charges(self, table: Table) -> None:
        """Each failure is charged at most once, and what any member was told of is not forgotten."""
        known = max(self._world.agents[place.agent].restarts for place in table.places)
        if not known <= table.restarts <= self.failures:
            detail = f"round {table.round} counts {table.restarts}, members {known}; {self.failures} failures"
            raise Violation("restarts are one number for the run", detail)
        if table.reason is Reason.WORKER_FAILED and not self.failures and not self._world.unusable:
            raise Violation("what is said of a round is true", f"round {table.round}: no worker has failed")

    def after_charge(self, round_: int) -> None:
        """A leader charges a failure; that of a script that has never worked, as far as anybody knows, is its own."""
        places = self.told[round_].places
        if len(places) in self._world.unusable:
            members = [self._world.agents[place.agent] for place in places]
            if healthy := [agent.name for agent in members if agent.alive and agent.has_stepped]:
                raise Violation("only workers that fail by themselves are charged", f"{round_}: {healthy} have stepped")
            self.failures += 1

    def after_work(self, round_: int) -> None:
        """Workers of a round are ready, and take a step together once all are."""
        if self._is_whole(round_):
            for place in self.told[round_].places:
                agent = self._world.agents[place.agent]
                agent.stepped = agent.has_stepped = True

    def after_take(self, leader: Leader) -> None:
        """An agent has taken an epoch: the leader before was lost, let go, or could not be heard for long enough.

        Whoever stood before that leader had told anybody of a round may not have found it.
        """
        record = self._world.records.epoch(leader.epoch - 1)
        if record is None or leader.began_at < self._led_since.get(leader.epoch - 1, math.inf) + LATE:
            return
        last = self._world.agents[str(record["agent"])]
        well = last.alive and not last.leaving and last.leader is not None and last.leader.epoch == leader.epoch - 1
        limit = self._world.limit
        enough = default_leader_limit(limit) - limit / 3 - LATE
        if well and self._world.longest_silence() < enough:
            raise Violation("a leader that is well is not followed", f"epoch {leader.epoch} of {leader.agent.name}")

    def after_look(self, agent: Agent) -> None:
        """An agent has looked at its clock."""
        if agent.workers is None:
            return
        lost = agent.last_message_at + FENCE * self._world.limit + RESTORE + NAP
        lost = min(lost, agent.unlinked_since + RESTORE)
        if self._world.now > max(lost, agent.awake_since + RESTORE) + STOP + 3 * NAP:
            raise Violation("who hears no leader stops by itself", f"{agent.name} has workers of {agent.workers}")

    def _check_majority(self, leader: Leader, table: Table) -> None:
        """A round holds the greater part of those members of the last one that live and are not about to go."""
        before = self._world.records.round(table.round - 1)
        if before is None:
            return
        members = [str(place["agent"]) for place in before["places"]]
        agents = self._world.agents
        living = [name for name in members if agents[name].alive and not agents[name].leaving]
        if self._world.unusable:
            # Those that it has no place for have come as well, and are spares.
            return
        here = {place.agent for place in table.places}.intersection(members)
        if 2 * len(here) < len(living):
            raise Violation("a majority goes on", f"round {table.round} has {sorted(here)}, {living} live")
        if living and 2 * len(here) == len(living):
            last = str(before["leader"])
            decides = last if agents[last].alive and not agents[last].leaving else living[0]
            if here.isdisjoint({last, decides}) and leader.agent.name not in (last, decides):
                raise Violation("of two halves one goes on", f"round {table.round} has {sorted(here)}, {living} live")

    def after_start(self, agent: Agent, message: Assignment) -> None:
        """An agent starts workers; only now a round can become whole."""
        table = self.told.get(message.round)
        if table is None or message.place not in table.places or message.nodes != len(table.places):
            raise Violation("a table never changes", str(message))
        self._world.tell(agent.name, f"starts workers of round {table.round}: {[p.agent for p in table.places]}")
        rounds = {each.workers for each in self._world.agents.values() if each.workers is not None}
        whole = [number for number in sorted(rounds) if self._is_whole(number)]
        if len(whole) > 1:
            raise Violation("one group trains", f"rounds {whole} are whole")
        if table.round not in self._started_at:
            self._started_at[table.round] = self._world.now
            for each in self._world.agents.values():
                self._must_end(each, table.round)
        newer = [number for number in self._started_at if number > table.round]
        if newer:
            self._must_end(agent, min(newer))

    def _must_end(self, agent: Agent, follower: int) -> None:
        """Workers of a round before this one, which has started, end within their time."""
        if agent.workers is not None and agent.workers < follower:
            due = max(self._started_at[follower] + BOUND, self._world.now)
            self._world.at(due, self._check_ended, agent, agent.workers)

    def _check_ended(self, agent: Agent, number: int) -> None:
        # Whoever was paused has its time from then on; and what a leader says waits for what it writes down.
        if agent.workers != number or not agent.alive or agent.paused:
            return
        due = max(agent.awake_since, self._world.slow_until) + BOUND
        if self._world.now < due:
            self._world.at(due, self._check_ended, agent, number)
        else:
            raise Violation("old workers end in time", f"{agent.name} has workers of round {number}")

    def after_pause(self, agent: Agent) -> None:
        """An agent goes on that was paused."""
        newer = [number for number in self._started_at if agent.workers is not None and number > agent.workers]
        if newer:
            self._world.at(self._world.now + BOUND, self._check_ended, agent, agent.workers)

    def _is_whole(self, number: int) -> bool:
        """Whether a round can take a step: that takes the workers of all its members."""
        agents = self._world.agents
        return all(
            (agent := agents[place.agent]).alive and agent.workers == number for place in self.told[number].places
        )
