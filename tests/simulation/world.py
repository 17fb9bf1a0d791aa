"""The simulated run: virtual time, the actions of a schedule, and what must be true once nothing goes wrong."""

from __future__ import annotations

from collections.abc import Callable

from slurm_elastic.rendezvous.membership.agents import Status
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.events import NodesDown
from slurm_elastic.rendezvous.membership.state import Phase
from tests.simulation import faults
from tests.simulation.agents import SimulatedAgent
from tests.simulation.checks import Checks
from tests.simulation.leader import SimulatedLeader
from tests.simulation.tables import largest, usable
from tests.simulation.violation import Violation
from tests.simulation.virtual import Time
from tests.simulation.workers import Group


class World(Time):
    """One run of one schedule.

    Attributes:
        agents: all that ever started, by identity.
        completing: whether workers come to their end.
    """

    def __init__(self, schedule: faults.Schedule, transcript: list[str] | None = None) -> None:
        super().__init__(transcript)
        self.schedule = schedule
        self.noise = schedule.noise
        self.agents: dict[str, SimulatedAgent] = {}
        self.completing = False
        self.checks = Checks(self)
        self.groups: dict[int, Group] = {}
        self.leader = SimulatedLeader(self, schedule.settings)

    def group(self, table: Table) -> Group:
        """The workers of a round, all together."""
        if table.round not in self.groups:
            self.groups[table.round] = Group(self, table.round, len(table.places))
        return self.groups[table.round]

    def break_collectives(self, source: SimulatedAgent, round_: int, cause: str) -> None:
        """Workers of a round are gone: the others' fail soon, or not, as their next collective comes or not."""
        for agent in self.agents.values():
            if agent is not source and agent.workers == round_ and source.rng.random() < 0.8:
                agent.later(0.001 + source.rng.random() * 0.3, agent.fail, cause, round_)

    def run(self) -> None:
        """Play the schedule, then let the run settle and end well.

        Raises:
            Violation: a promise is broken.
        """
        self.settle()
        self.end()

    def settle(self) -> None:
        """Play the schedule, and go on until the run is as it should be with the agents that are left."""
        self.leader.start()
        for action in self.schedule.actions:
            self.at(action.at, self._happen, action)
        self.play(self.schedule.quiet_at)
        settings = self.schedule.settings
        seconds_to_settle = 2 * settings.heartbeat_limit + settings.last_call_timeout + 12.0
        self._play_until(self._unsettled, seconds_to_settle + self._timeout_of_too_few(), "does not settle")

    def end(self) -> None:
        """Let all workers come to their end, and see that every agent learns of it."""
        self.completing = True
        for agent in self.agents.values():
            agent.complete_soon()
            if agent.rng.random() < 0.2:
                # Nobody may miss the end, even now.
                agent.later(agent.rng.uniform(0.3, 0.6), lambda agent=agent: agent.break_connection(noticed=True))
        self._play_until(self._unfinished, 8.0 + self._timeout_of_too_few(), "does not end")

    def _play_until(self, open_question: Callable[[], str], seconds_to_settle: float, name: str) -> None:
        deadline = self.now + seconds_to_settle
        while question := open_question():
            if self.now >= deadline:
                raise Violation(f"the run {name}", f"{seconds_to_settle:g} s after it could: {question}")
            self.play(self.now + 0.1)

    def _living(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents.values() if agent.alive and agent.leaving is None]

    def _usable(self) -> int:
        return usable(self.schedule.settings, [agent.candidate for agent in self._living()])

    def _timeout_of_too_few(self) -> float:
        settings = self.schedule.settings
        too_few = largest(settings, self._usable(), self.schedule.unusable) == 0
        return settings.join_timeout if too_few else 0.0

    def _unsettled(self) -> str:
        """What keeps the run from being as it should with all agents that live; empty when it is."""
        state = self.leader.state
        if state.phase is Phase.CLOSED:
            return ""
        if not state.agents and not any(agent.alive for agent in self.agents.values()):
            # This leader needs no agent to lead, and waits for the next one.
            return ""
        if state.phase is Phase.FORMING or state.table is None:
            return "a round is being formed"
        if state.inquest is not None or state.broken:
            return "somebody's fate is open"
        if state.planned_stop is not None:
            return "a round comes to its planned end"
        finished = {name for name, agent in state.agents.items() if agent.status is Status.FINISHED}
        living = self._living()
        if {agent.name for agent in living} - finished != set(state.agents) - finished:
            return "the leader does not know exactly those that live"
        if len(state.table.places) in self.schedule.unusable and state.phase is Phase.RUNNING:
            return "workers fail soon"
        if not finished and len(state.table.places) < self.checks.smallest(self._usable()):
            return "somebody who could train does not"
        for place in state.table.places:
            agent = self.agents[place.agent]
            if state.table.round not in (agent.workers, agent.done):
                return f"{place.agent} has a place but no workers"
            if agent.stepping is not None and (agent.stepping.waiting or agent.stepping.saving):
                return f"workers of {place.agent} wait before a step"
        return ""

    def _unfinished(self) -> str:
        left = [agent.name for agent in self.agents.values() if agent.alive]
        return f"{', '.join(left)} would wait for ever" if left else ""

    # What happens.

    def _happen(self, action: faults.Action) -> None:
        self.tell(action.agent, f"*** {type(action).__name__}{f' {action.seconds:.3f} s' if action.seconds else ''}")
        match action:
            case faults.Arrive():
                if action.agent not in self.agents:
                    self.agents[action.agent] = SimulatedAgent(
                        self, action.candidate(), takes_part=action.takes_part, ready_after=action.seconds
                    )
                return
            case faults.StallLeader():
                self.leader.stall(action.seconds, timer_first=action.timer_first)
                return
            case faults.SlowLedger():
                self.leader.slow_ledger(action.seconds)
                return
            case faults.SlurmSays():
                self._slurm_says(action.agent)
                return
        agent = self.agents.get(action.agent)
        if agent is None or not agent.alive:
            return
        match action:
            case faults.Die(how=how):
                silent = how in ("power", "fading")
                if action.seconds:
                    agent.lose_workers()
                self.at(self.now + action.seconds, lambda: agent.die(silent=silent))
            case faults.Hang():
                agent.pause()
                self.at(self.now + action.seconds, agent.go_on)
            case faults.Leave():
                agent.later(0.0, agent.leave, action.reason, action.seconds or None)
            case faults.Fail():
                agent.later(0.0, agent.fail, "by itself")
            case faults.Complete():
                agent.later(0.0, lambda: agent.complete(goes=action.goes))
            case faults.Break():
                agent.break_connection(noticed=action.noticed)
            case faults.Close():
                agent.later(0.0, agent.close_run)
            case faults.Cut():
                self._cut(agent, action)

    def _cut(self, agent: SimulatedAgent, action: faults.Cut) -> None:
        agent.cut_link()
        self.at(self.now + action.seconds, agent.heal_link, action.afterwards)
        if action.collectives and agent.workers is not None:
            self.checks.after_cut_collectives(agent.workers)
            self.break_collectives(agent, agent.workers, "the network was cut")

    def _slurm_says(self, wrongly: str) -> None:
        dead = {agent.node for agent in self.agents.values() if not agent.alive}
        down = dead - {agent.node for agent in self.agents.values() if agent.alive}
        if wrongly in self.agents:
            down.add(self.agents[wrongly].node)
        self.leader.take_in_signs()
        self.leader.handle(NodesDown(frozenset(down)))
