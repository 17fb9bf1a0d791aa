"""The promises, checked after every step of the leader and every move of an agent.

They keep their own account of what the leader was told, beside the machine's, and know the truth about every node.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.agents import Reason, Status
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.state import Phase, State
from tests.simulation.tables import check_table, largest, usable
from tests.simulation.violation import Violation, require

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.membership.agents import Agent
    from tests.simulation.agents import SimulatedAgent
    from tests.simulation.workers import Workers
    from tests.simulation.world import World


class Checks:
    """What is promised, and what has to be remembered to check it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tables: dict[int, Table] = {}
        self._latest: Table | None = None
        self._over: set[int] = set()
        # What the leader was told.
        self._attempts: dict[str, int] = {}
        self._connected: set[str] = set()
        self._coming: set[str] = set()
        self._heard_of: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._left: set[str] = set()
        self._finished: set[str] = set()
        self._known_nodes: set[str] = set()
        self._ended: set[str] = set()
        # Whom the leader has given up without being told: they may have workers, and nobody waits for them.
        self._given_up: set[str] = set()
        # The truth about why workers failed.
        self._own_failures: set[int] = set()
        self._cut_rounds: set[int] = set()
        self._ragged: dict[int, list[SimulatedAgent]] = {}
        # Fingerprint of the failure that was charged last.
        self._last_failure = ""
        # Numbers of nodes that the script cannot use, as the leader has found.
        self._unusable: set[int] = set()
        # Rounds that ended as planned, or otherwise after that was tried.
        self.planned: set[int] = set()
        self.broken_off: set[int] = set()
        # The steps that were agreed on, and who has stopped there.
        self._stops: dict[int, int] = {}
        self._stopped: set[tuple[int, str]] = set()

    def smallest(self, agents: int) -> int:
        """How many of so many agents train at least. The run need not try all numbers when one has failed."""
        settings, ran = self._world.schedule.settings, self._world.leader.state.ran
        size = largest(settings, agents, self._unusable)
        worked = [each for each in ran if each <= agents and each not in self._unusable] if self._unusable else []
        return min(size, max(worked, default=size))

    def _size(self, state: State, agents: int) -> int:
        """How many of so many agents the next round takes."""
        before = len(self._latest.places) if self._latest is not None else 0
        if before in self._unusable and self.smallest(agents) in state.ran:
            return self.smallest(agents)
        return largest(state.settings, agents, self._unusable)

    # Moves of agents.

    def after_place(self, agent: SimulatedAgent, table: Table) -> None:
        """An agent has taken a place."""
        self._world.tell(agent.name, f"starts workers of round {table.round}")
        require(table == self.tables.get(table.round), "a table never changes", table)
        require(sum(place.agent == agent.name for place in table.places) == 1, "placed agents are in the table", table)
        if agent.name not in self._given_up:
            self._check_one_group(table.round)

    def after_failure(self, agent: SimulatedAgent, round_: int, cause: str) -> None:
        """A worker has failed."""
        self._world.tell(agent.name, f"worker of round {round_} fails: {cause}")
        if cause == "by itself":
            self._own_failures.add(round_)

    def after_cut_collectives(self, round_: int) -> None:
        """A cut network has broken this round's collectives; if it heals soon, nobody is lost who explains it."""
        self._cut_rounds.add(round_)

    def after_ragged_death(self, agent: SimulatedAgent, round_: int) -> None:
        """An agent's workers have died of the same cause as it will, a moment before it."""
        self._ragged.setdefault(round_, []).append(agent)

    # The planned end of rounds.

    def after_boundary(self, agent: SimulatedAgent, round_: int, step: int) -> None:
        """Workers have completed a step."""
        stop = self._stops.get(round_)
        if stop is not None and agent.name not in self._given_up:
            require(step <= stop, "nobody passes the agreed step", f"{agent.name} takes step {step} of round {round_}")

    def after_stop(self, agent: SimulatedAgent, round_: int, step: int) -> None:
        """Workers have come to the step at which they were told to stop."""
        self._world.tell(agent.name, f"workers of round {round_} stop after step {step}")
        require(step == self._stops.get(round_), "all stop at one step", f"{agent.name} at {step} of round {round_}")
        self._stopped.add((round_, agent.name))

    def after_answer(self, agent: SimulatedAgent, workers: Workers, step: int | None, *, takes_part: bool) -> None:
        """An agent has been asked for a step."""
        if step is None and takes_part:
            furthest = workers.group.furthest
            require(furthest == 0, "workers that are asked take part", f"{agent.name} after {furthest} steps")

    def after_deadline(self, agent: SimulatedAgent) -> None:
        """An agent that leaves has to be gone."""
        if not agent.ever_hung:
            require(agent.workers is None, "who has to go is gone in time", agent.name)

    def _check_planned(
        self, before: State, event: events.Event, decisions: tuple[events.Decision, ...], end: events.Interrupt
    ) -> None:
        """A round that was about to end as planned has ended: as planned, or for a reason."""
        planned, now = before.planned_stop, self._world.now
        if planned is None:
            return
        (self.planned if end.step is not None else self.broken_off).add(end.message.round)
        if end.step is not None:
            members = (place.agent for place in self.tables[end.message.round].places)
            missing = [
                name
                for name in members
                if (end.message.round, name) not in self._stopped
                and name not in self._finished | self._given_up
                and not self._world.agents[name].has_failed
            ]
            require(not missing, "a round ends when all have stopped", missing)
            return
        late = now >= planned.deadline
        unanswered = planned.stop is None and now >= planned.since + before.heartbeat_limit
        away = any(isinstance(decision, events.Drop | events.Retire) for decision in decisions)
        told = isinstance(event, events.Held) and event.step is None
        alone = isinstance(event, events.Joined) and planned.stop is None
        explained = isinstance(event, events.Leaving) and before.inquest is not None
        charged = end.message.reason is Reason.WORKER_FAILED
        require(
            late or unanswered or away or told or alone or explained or charged,
            "a planned end is not broken off without a reason",
            end,
        )

    # Steps of the leader.

    def after_step(
        self, before: State, event: events.Event, after: State, decisions: tuple[events.Decision, ...]
    ) -> None:
        """The machine has processed one event."""
        if self._world.transcript is not None:
            self._tell(event, decisions)
        self._follow(event)
        self._check_books(after)
        for decision in decisions:
            if isinstance(decision, events.Drop | events.Retire):
                self._check_loss(after, event, decision)
                if isinstance(decision, events.Drop) or not isinstance(event, events.Leaving | events.Left):
                    self._given_up.add(decision.agent)
            elif isinstance(decision, events.Publish):
                self._check_publish(after, decision.table)
            elif isinstance(decision, events.Finish) and before.finish is None:
                self._check_finish(before, after, decision)
            elif isinstance(decision, events.Interrupt):
                over = decision.message
                self._over.add(over.round)
                if decision.unusable is not None:
                    self._check_unusable(decision.unusable)
                if over.detail != "this round is over":
                    self._check_planned(before, event, decisions, decision)
                if over.reason in (Reason.NODE_LOST, Reason.NODE_LEFT) and after.phase is not before.phase:
                    self._check_cause(before, event, decisions)
            elif isinstance(decision, events.Send) and isinstance(stopping := decision.message, events.Stopping):
                stop = self._stops.setdefault(stopping.round, stopping.step)
                require(stop == stopping.step, "all stop at one step", decision)
        if (
            after.planned_stop is not None
            and before.planned_stop is None
            and after.planned_stop.reason is Reason.NODE_JOINED
        ):
            self._check_gathered(before, after)
        if after.phase is Phase.RUNNING:
            require(after.table is self._latest, "one table is current", after.table)
        if self._given_up:
            self._given_up -= after.agents.keys() - before.agents.keys()
        if after.restarts != before.restarts or before.inquest is not None or after.inquest is not None:
            self._check_blame(before, after, decisions)
        elif decisions:
            ended = [decision.message for decision in decisions if isinstance(decision, events.Interrupt)]
            wrong = [end for end in ended if end.reason is Reason.WORKER_FAILED and end.detail != "this round is over"]
            require(not wrong, "a worker failure is charged or explained", wrong)
        # A round may close in the step in which the failure of the one before is charged.
        require(after.last_failure == self._last_failure, "the last failure is on record", after.last_failure)
        if after.phase is Phase.FORMING:
            self._check_no_needless_wait(after)
        if isinstance(event, events.Tick):
            require(next_deadline(after) > self._world.now, "what is due is done", after)

    def _follow(self, event: events.Event) -> None:
        match event:
            case events.Joined(candidate, attempt):
                name = candidate.agent
                self._heard_of[candidate.cohort] += name not in self._attempts
                self._attempts[name] = max(attempt, self._attempts.get(name, 0))
                self._known_nodes.add(candidate.node)
                self._coming.discard(name)
                # Said before it ended, and it came late: the leader has to find out once more.
                self._ended.discard(name)
            case events.Connected(agent):
                self._connected.add(agent)
                self._coming.discard(agent)
                if event.coming and agent not in self._attempts:
                    self._coming.add(agent)
            case events.Disconnected(agent):
                self._connected.discard(agent)
                self._coming.discard(agent)
            case events.Finished(agent, round_) if self._latest is not None and round_ == self._latest.round:
                self._finished.add(agent)
            case events.Leaving(agent):
                self._leaving.add(agent)
            case events.Left(agent):
                self._leaving.add(agent)
                self._left.add(agent)
            case events.NodesDown(down):
                self._known_nodes |= down
            case events.Gone(agents):
                self._ended.update(agents)

    def _check_books(self, state: State) -> None:
        """What the machine counts is what there is."""
        agents = state.agents.values()
        blocking = sum(agent.status is not Status.WAITING for agent in agents)
        require(state.blocking == blocking, "the books are right", ("blocking", state.blocking, "counted", blocking))
        if state.phase is not Phase.CLOSED:
            require(state.broken.keys() <= state.agents.keys(), "the books are right", ("broken", state.broken))
            if state.broken:
                first = state.first_broken_at
                require(first <= min(state.broken.values()), "the books are right", ("first broken at", first))
        require(state.restarts <= state.settings.max_restarts, "restarts stay within the limit", state.restarts)

    def _check_publish(self, after: State, table: Table) -> None:
        settings, latest = after.settings, self._latest
        first = settings.first_round if latest is None else latest.round + 1
        require(table.round == first, "rounds follow each other", table.round)
        require(latest is None or latest.round in self._over, "one table is current", table)
        self._check_one_group(table.round)
        check_table(after, table, self._latest, self._size(after, _usable(after)))
        known = {len(each.places) for each in self.tables.values()} | {size for size, _ in settings.first_ran}
        require({size for size, _ in table.ran} <= known, "only rounds show what works", table.ran)
        require(table.unusable == tuple(sorted(self._unusable)), "what the script cannot use is on record", table)
        require(table.restarts == after.restarts, "restarts are the same for all", table)
        require(table.last_failure == after.last_failure, "the last failure is on record", table)
        for place in table.places:
            name = place.agent
            require(name in self._connected, "members are connected", name)
            require(name not in self._leaving, "members are not leaving", name)
            require(after.agents[name].attempt == self._attempts[name], "members have joined", name)
        # Whoever has not come by now is not waited for again.
        for agent in after.agents.values():
            self._heard_of[agent.candidate.cohort] = agent.candidate.cohort_size
        self._known_nodes |= set(settings.expected_nodes)
        self._latest = self.tables[table.round] = table
        self._finished.clear()

    def _check_loss(self, state: State, event: events.Event, decision: events.Drop | events.Retire) -> None:
        agent = self._world.agents[decision.agent]
        if isinstance(event, events.Leaving | events.Left):
            require(agent.leaving or agent.done is not None, "nobody who is well is given up", decision)
        elif agent.name in self._connected and agent.alive:
            silence = self._world.now - agent.well_since()
            require(silence < state.settings.heartbeat_limit, "nobody who is well is given up", decision)

    def _check_cause(self, before: State, event: events.Event, decisions: tuple[events.Decision, ...]) -> None:
        gone = {decision.agent for decision in decisions if isinstance(decision, events.Drop | events.Retire)}
        if before.planned_stop is not None and not gone:
            return
        if isinstance(event, events.Leaving | events.Left):
            gone.add(event.agent)
        require(gone - self._finished, "who has finished is not missed", gone)

    def _check_one_group(self, round_: int) -> None:
        for agent in self._world.agents.values():
            if agent.workers is not None and agent.workers != round_ and agent.name not in self._given_up:
                raise Violation(
                    "one group trains", f"round {round_} begins while {agent.name} has workers of {agent.workers}"
                )

    def _check_blame(self, before: State, after: State, decisions: tuple[events.Decision, ...]) -> None:
        judged = [
            d
            for d in decisions
            if isinstance(d, events.Interrupt) and d.message.reason is Reason.WORKER_FAILED and d.agents
        ]
        over = [d for d in judged if d.message.detail != "this round is over" and d.unusable is None]
        if after.restarts == before.restarts:
            dissolved = before.inquest is not None and after.inquest is None and after.phase is not Phase.CLOSED
            explained = after.reason in (Reason.NODE_LOST, Reason.NODE_LEFT) or self._latest_is_unusable(before)
            require(not dissolved or explained, "a worker failure is charged or explained", decisions)
            require(not over, "a worker failure is charged or explained", decisions)
        else:
            require(after.restarts == before.restarts + 1, "restarts count one by one", after.restarts)
            self._check_charge(before)
            require(not self._is_repeated(before), "the same failure twice in a row ends the run", before.inquest)
            self._last_failure = before.inquest.failure.fingerprint if before.inquest is not None else ""

    def _latest_is_unusable(self, before: State) -> bool:
        return before.table is not None and len(before.table.places) in self._unusable

    def _is_repeated(self, before: State) -> bool:
        said = before.inquest.failure.fingerprint if before.inquest is not None else ""
        return said != "" and said == self._last_failure

    def _check_unusable(self, size: int) -> None:
        """A failure is not charged, as the script cannot use so many nodes."""
        require(size not in self._unusable, "what the script cannot use is tried once", size)
        usable = size not in self._world.schedule.unusable
        require(not usable, "a worker failure is charged or explained", size)
        self._unusable.add(size)

    def _check_charge(self, before: State) -> None:
        inquest = before.inquest
        if inquest is None or before.table is None:
            raise Violation("charges follow a judgement", "")
        round_ = before.table.round
        # Two cases cannot be told from a failure of the workers alone: a network that heals before anybody is lost,
        # and an agent that still answers while its node is dying, and whose end becomes known only after the verdict.
        settled = self._world.now >= inquest.since + before.settings.settle_time
        answered_dying = settled and any(
            agent.answered >= before.probe and agent.name in self._connected for agent in self._ragged.get(round_, ())
        )
        require(
            round_ in self._own_failures or round_ in self._cut_rounds or answered_dying,
            "only workers that fail by themselves are charged",
            inquest.failure,
        )

    def _check_gathered(self, before: State, after: State) -> None:
        """A running round ends for new agents."""
        settings, table = before.settings, self._latest
        coming = self._coming - self._leaving
        if before.newcomers is None or table is None:
            return
        first, _ = before.newcomers
        here = largest(settings, _usable(before), self._unusable)
        require(here > len(table.places), "a round ends for new nodes only if the next one is larger", here)
        if self._world.now >= first + settings.last_call_timeout:
            return
        # Whose connection is broken is given up by now: no round ends for new nodes before that. Nor does who is given
        # up in this moment, being silent, make a round larger.
        more = largest(settings, len(after.agents.keys() - set(before.broken)) + len(coming), self._unusable) > here
        require(not coming or not more, "joins that are close together make one round", coming)

    def _check_no_needless_wait(self, state: State) -> None:
        waiting = [agent for agent in state.agents.values() if agent.status is Status.WAITING]
        settings = state.settings
        size = self._size(state, usable(settings, [agent.candidate for agent in waiting]))
        if not size or len(waiting) < len(state.agents) or state.broken:
            return
        if not self._has_majority(waiting):
            return
        missing = len(set(settings.expected_nodes) - self._known_nodes) or self._missing_with(waiting)
        larger = missing > 0 and self._size(state, len(waiting) + missing) > size
        require(larger, "no wait that is not needed", [agent.candidate.agent for agent in waiting])

    def _missing_with(self, waiting: list[Agent]) -> int:
        """How many the cohorts of these agents lack, where a run begins without anybody knowing who comes."""
        here = {agent.candidate.agent for agent in waiting}
        before = self._latest.places if self._latest is not None else ()
        if self._world.schedule.settings.expected_nodes or any(place.agent in here for place in before):
            return 0
        sizes = {agent.candidate.cohort: agent.candidate.cohort_size for agent in waiting}
        return sum(max(0, size - self._heard_of[cohort]) for cohort, size in sizes.items())

    def _has_majority(self, waiting: list[Agent]) -> bool:
        """Whether enough of the last round's members are there; who is on its way, or has ended unknown, is not."""
        members = {place.agent for place in self._latest.places} if self._latest is not None else set()
        here = members & {agent.candidate.agent for agent in waiting}
        # Workers of those that only said that they go are harmless as long as somebody of their round has stopped.
        gone = self._ended | (self._leaving if here else self._left)
        return 2 * len(here) >= len(members - gone)

    def _check_finish(self, before: State, after: State, finish: events.Finish) -> None:
        settings, table = after.settings, self._latest
        match finish.message.outcome:
            case events.Outcome.SUCCEEDED:
                assert table is not None
                unfinished = [
                    place.agent for place in table.places if self._world.agents[place.agent].done != table.round
                ]
                require(not unfinished, "a run succeeds when all have finished", unfinished)
            case events.Outcome.FAILED:
                used_up = before.restarts == settings.max_restarts
                require(used_up or self._is_repeated(before), "a run fails when restarts are used up", before.restarts)
                self._check_charge(before)
            case events.Outcome.TIMED_OUT:
                waited = self._world.now - before.forming_since
                require(waited >= settings.join_timeout - 1e-6, "a run is given up late", waited)
            case events.Outcome.CLOSED:
                pass

    def _tell(self, event: events.Event, decisions: tuple[events.Decision, ...]) -> None:
        if not isinstance(event, events.Tick) and type(event).__name__ != "SignsOfLife":
            self._world.tell("leader", f"hears {event}")
        for decision in decisions:
            self._world.tell("leader", f"  decides {decision}")


def _usable(state: State) -> int:
    return usable(state.settings, [agent.candidate for agent in state.agents.values()])
