"""A leader's term: in which order it writes, sends and asks. A pure state machine around the membership's.

An epoch (the number of a term) is claimed, and only then the last round is read; a round is written down, and only then
the newest epoch is read. So all that a leader sends to an agent was written down while its term was the newest, and the
agent that claims the next one finds it.

The leader carries out decisions of the membership machine one after the other. To write a round down can take long on a
shared file system, and the machine receives signs of life meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_elastic.rendezvous.election.campaign import seconds_of_questions
from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.leader_change import blocks_election, misses_members, missing
from slurm_elastic.rendezvous.membership.machine import step as membership_step
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.membership.state import Phase, State, initial_state

PROBE_AGAIN = 0.2
"""Seconds between two probes of members that are missing; of thousands, as long as these take to come by themselves."""
ASK_SLURM_FIRST, ASK_SLURM_AGAIN = 0.2, 5.2
"""Seconds until the leader asks Slurm about missing members: by then their nodes have answered which have ended."""
ASK_NODES_FIRST, ASK_NODES_AGAIN = 1.0, 5.0
"""The same for nodes of the allocation that are missing."""
CHECK_TERM = 1.0
"""Seconds between two readings of the newest term while a round is formed."""


# Actions. Those of the records are answered by RecordsAnswered or RecordsFailed.


@dataclass(frozen=True, slots=True)
class ClaimTerm:
    """Take the term; allowed unless another agent has it."""


@dataclass(frozen=True, slots=True)
class ConfirmLastRound:
    """Read the last round; allowed if it is the one that this term follows."""


@dataclass(frozen=True, slots=True)
class PublishEndpoint:
    """Write the leader's endpoint down."""


@dataclass(frozen=True, slots=True)
class CheckTerm:
    """Read the newest term; allowed if it is this one. No record waits for a reading that is `watching`."""

    watching: bool = False


@dataclass(frozen=True, slots=True)
class WriteRound:
    """Write a round down; allowed unless another leader has written one of that number."""

    table: Table


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Write down that the run has ended; allowed if this term is the newest."""

    finish: events.Finish


RecordsAction = ClaimTerm | ConfirmLastRound | PublishEndpoint | CheckTerm | WriteRound | RecordEnd


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Carry out a decision that led to this state, and is on record if it has to be; `log` it in the log of the run."""

    state: State
    decision: events.Decision
    log: bool


@dataclass(frozen=True, slots=True)
class ProbeMembers:
    """Ask the nodes of these members whether they have ended. Answered by AgentsEnded."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeDisconnected:
    """Ask the node of an agent whose connection broke whether its process has ended; answered by DisconnectedEnded.
    If it has, the leader does not wait for the connection to come back."""

    agent: str


@dataclass(frozen=True, slots=True)
class AskSlurmAboutAgents:
    """Ask Slurm which of these members are gone. Answered by AgentsGone."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskSlurmAboutNodes:
    """Ask Slurm which of these nodes are down. Answered by NodesDown."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportClaimed:
    """The term is claimed, the last round confirmed, the endpoint published: this agent leads."""


@dataclass(frozen=True, slots=True)
class ReportBlocking:
    """This candidate keeps members of the last round from each other, or does so no more; see
    :func:`~slurm_elastic.rendezvous.membership.leader_change.blocks_election`."""

    blocks: bool


@dataclass(frozen=True, slots=True)
class StepDown:
    """Lead no more. `why` is one line, empty after a resignation; a person has to fix something if it has `failed`."""

    why: str = ""
    failed: bool = False


Question = ProbeMembers | AskSlurmAboutAgents | AskSlurmAboutNodes
Report = ReportClaimed | ReportBlocking

TermAction = RecordsAction | CarryOut | Question | ProbeDisconnected | Report | StepDown


# Events, beside those of the membership.


@dataclass(frozen=True, slots=True)
class RecordsAnswered:
    """An action on the records is through, and was allowed or not."""

    action: RecordsAction
    allowed: bool


@dataclass(frozen=True, slots=True)
class RecordsFailed:
    """The records did not answer, or cannot be used: nothing is known of what a write did."""

    action: RecordsAction
    why: str


@dataclass(frozen=True, slots=True)
class AgentsEnded:
    """The nodes say that these processes have ended."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class DisconnectedEnded:
    """The node of an agent whose connection broke says whether its process has ended."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class AgentsGone:
    """Slurm says that these agents are gone."""

    agents: frozenset[str]


TermEvent = events.Event | RecordsAnswered | RecordsFailed | AgentsEnded | DisconnectedEnded | AgentsGone


@dataclass(frozen=True)
class Term:
    """One leader's term. Times are the leader's monotonic time.

    Attributes:
        deadline: when the machine has to see a Tick at the latest.
        tick_at: when the membership machine has to see it.
        queue: decisions that are not carried out yet, each with the state after it.
        writing: what is still to be done with the records for the first of these; its first action is under way.
        probe_at, ask_agents_at, ask_nodes_at, check_at: when to find out more; infinite while that is not wanted, or
            under way.
        blocks: whether this candidate was last reported to block others.
        interrupted: the last round whose end is in the log of the run.
    """

    number: int
    membership: State
    deadline: float = -math.inf
    tick_at: float = -math.inf
    queue: tuple[tuple[State, events.Decision], ...] = ()
    writing: tuple[RecordsAction, ...] = ()
    probe_at: float = math.inf
    ask_agents_at: float = math.inf
    ask_nodes_at: float = math.inf
    check_at: float = math.inf
    asking: frozenset[type] = frozenset()
    blocks: bool = False
    interrupted: int = -1
    over: bool = False


def initial_term(number: int, settings: Settings, now: float) -> Term:
    """Return the state of a leader that has just begun to serve; it acts with its first event."""
    return Term(number, initial_state(settings, now))


def step(term: Term, event: TermEvent, now: float) -> tuple[Term, tuple[TermAction, ...]]:
    """Process one event at this moment; return the next state, and what has to be done, in order."""
    if term.over:
        return term, ()
    turn = _Step(term, now)
    handler = _HANDLERS.get(type(event))
    if handler is None:
        turn.happened(event)  # type: ignore[arg-type]
    else:
        handler(turn, event)
    turn.find_out()
    return turn.finish(), tuple(turn.actions)


class _Step:
    """One step under way."""

    def __init__(self, term: Term, now: float) -> None:
        # A copy of its own, which changes in place until the step is over.
        self.term, self.now = replace(term), now
        self.was_forming = term.membership.phase is Phase.FORMING
        self.state = term.membership
        self.queue = term.queue
        self.writing = term.writing
        self.actions: list[TermAction] = []

    def finish(self) -> Term:
        term = self.term
        if self.state is not term.membership:
            self.change(membership=self.state, tick_at=next_deadline(self.state))
        self.change(
            queue=self.queue,
            writing=self.writing,
            deadline=min(term.tick_at, term.probe_at, term.ask_agents_at, term.ask_nodes_at, term.check_at),
        )
        return term

    def change(self, **changes: Any) -> None:
        self.term.__dict__.update(changes)

    # The membership.

    def happened(self, event: events.Event) -> None:
        self.state, decisions = membership_step(self.state, event, self.now)
        if decisions:
            self.queue += tuple((self.state, decision) for decision in decisions)
            self._carry_out()

    def tick(self, event: events.Tick) -> None:
        if self.now >= self.term.tick_at:
            self.happened(event)

    def disconnected(self, event: events.Disconnected) -> None:
        self.happened(event)
        if event.agent in self.state.broken:
            self.actions.append(ProbeDisconnected(event.agent))

    def disconnected_ended(self, event: DisconnectedEnded) -> None:
        # An agent that has come back meanwhile has not ended: another machine with its address has refused.
        ended = event.agents.intersection(self.state.broken)
        if ended:
            self.happened(events.Gone(ended))

    # Decisions, one after the other.

    def _carry_out(self) -> None:
        while self.queue and not self.writing and not self.term.over:
            state, decision = self.queue[0]
            self.writing = _to_be_written(state, decision)
            if self.writing:
                self.actions.append(self.writing[0])
            else:
                self._carried_out()

    def _carried_out(self) -> None:
        state, decision = self.queue[0]
        self.queue = self.queue[1:]
        log = True
        if isinstance(decision, events.Interrupt):
            # A leader that follows another one interrupts each member separately, and logs that once.
            log = decision.message.round > self.term.interrupted
            self.change(interrupted=max(self.term.interrupted, decision.message.round))
        self.actions.append(CarryOut(state, decision, log))
        if isinstance(decision, events.Resign):
            self._step_down(StepDown())

    def _step_down(self, action: StepDown) -> None:
        self.change(over=True)
        self.actions.append(action)

    def answered(self, event: RecordsAnswered) -> None:
        action = event.action
        if isinstance(action, CheckTerm) and action.watching:
            self.change(check_at=math.inf)
            self._answered(CheckTerm)
        elif not self.writing or action is not self.writing[0]:
            return
        if not event.allowed:
            self._step_down(StepDown(self._refused(action)))
        elif not (isinstance(action, CheckTerm) and action.watching):
            self.writing = self.writing[1:]
            if self.writing:
                self.actions.append(self.writing[0])
                return
            if isinstance(self.queue[0][1], events.Claim):
                self.actions.append(ReportClaimed())
                self.state, decisions = membership_step(self.state, events.Claimed(), self.now)
                self.queue += tuple((self.state, decision) for decision in decisions)
            self._carried_out()
            self._carry_out()

    def _refused(self, action: RecordsAction) -> str:
        match action:
            case ClaimTerm() | ConfirmLastRound():
                return f"another agent has taken epoch {self.term.number}"
            case WriteRound(table):
                return f"round {table.round} was published by another leader"
            case _:
                return "another agent leads with a newer epoch"

    def failed(self, event: RecordsFailed) -> None:
        self._step_down(StepDown(event.why, failed=True))

    # Questions of the leader to nodes and Slurm while a round is formed; there are none while no agent is missing.

    def find_out(self) -> None:
        if self.term.over:
            return
        state, term = self.state, self.term
        forming = state.phase is Phase.FORMING
        # An answer that comes once the round runs has set the time of the next question: no question follows.
        asks_at = min(term.probe_at, term.ask_agents_at, term.ask_nodes_at, term.check_at)
        if not forming and not self.was_forming and asks_at == math.inf:
            return
        misses = misses_members(state)
        self._ask("probe_at", ProbeMembers, misses, self._probe_pause(), PROBE_AGAIN)
        self._ask("ask_agents_at", AskSlurmAboutAgents, misses, ASK_SLURM_FIRST, ASK_SLURM_FIRST)
        expects = forming and bool(state.settings.expected_nodes)
        self._ask("ask_nodes_at", AskSlurmAboutNodes, expects, ASK_NODES_FIRST, ASK_NODES_FIRST)
        self._check_term(forming)
        if not state.claimed or self.term.blocks:
            blocks = blocks_election(state)
            if blocks != self.term.blocks:
                self.change(blocks=blocks)
                self.actions.append(ReportBlocking(blocks))

    def _probe_pause(self) -> float:
        """Return the seconds in which missing members may come before the leader probes them."""
        state = self.state
        if state.base is None:
            return 0.0
        return seconds_of_questions(len(state.base.members) - len(state.agents) - len(state.gone))

    def _check_term(self, forming: bool) -> None:
        if CheckTerm in self.term.asking:
            return
        at = self.term.check_at
        if not forming:
            self.change(check_at=math.inf)
        elif self.now < at < math.inf:
            return
        elif at != math.inf and self.state.claimed:
            self.change(check_at=math.inf)
            self._asked(CheckTerm)
            self.actions.append(CheckTerm(watching=True))
        else:
            self.change(check_at=self.now + CHECK_TERM)

    def _ask(self, moment: str, kind: type[Question], is_due: bool, first: float, again: float) -> None:
        """Ask about those that are missing now, or later, or, if it does not matter, never.

        `moment` is the field of the term that says when: `first` seconds after it matters, and `again` seconds after a
        look that found nothing missing.
        """
        if kind in self.term.asking:
            return
        before: float = getattr(self.term, moment)
        at = math.inf if not is_due else self.now + first if before == math.inf else before
        if self.now >= at:
            # Looked up only now: there may be thousands, and this is decided after every event.
            missing = _MISSING[kind](self.state)
            if missing:
                self._asked(kind)
                self.actions.append(kind(missing))
            at = math.inf if missing else self.now + again
        if at != before:
            self.change(**{moment: at})

    def _asked(self, kind: Any) -> None:
        self.change(asking=self.term.asking | {kind})

    def _answered(self, kind: type) -> None:
        self.change(asking=self.term.asking - {kind})

    def agents_ended(self, event: AgentsEnded) -> None:
        self._answered(ProbeMembers)
        self.change(probe_at=self.now + max(PROBE_AGAIN, self._probe_pause()))
        if event.agents:
            self.happened(events.Gone(event.agents))

    def agents_gone(self, event: AgentsGone) -> None:
        self._answered(AskSlurmAboutAgents)
        self.change(ask_agents_at=self.now + ASK_SLURM_AGAIN)
        # An agent that has come meanwhile is not gone, whatever Slurm says.
        gone = event.agents.intersection(missing(self.state))
        if gone:
            self.happened(events.Gone(gone))

    def nodes_down(self, event: events.NodesDown) -> None:
        self._answered(AskSlurmAboutNodes)
        self.change(ask_nodes_at=self.now + ASK_NODES_AGAIN)
        if event.down:
            self.happened(event)


_HANDLERS: dict[type, Callable[[_Step, Any], None]] = {
    events.Tick: _Step.tick,
    RecordsAnswered: _Step.answered,
    RecordsFailed: _Step.failed,
    events.Disconnected: _Step.disconnected,
    DisconnectedEnded: _Step.disconnected_ended,
    AgentsEnded: _Step.agents_ended,
    AgentsGone: _Step.agents_gone,
    events.NodesDown: _Step.nodes_down,
}


def _to_be_written(state: State, decision: events.Decision) -> tuple[RecordsAction, ...]:
    """Return the writes to the records that come before the messages of a decision."""
    match decision:
        case events.Claim():
            # First no other leader tells an agent of a round that is not on record yet; then no round was written since
            # this candidate looked.
            return (ClaimTerm(), ConfirmLastRound(), PublishEndpoint())
        case events.Publish(table):
            return (CheckTerm(), WriteRound(table), CheckTerm())
        case events.Finish() if state.claimed:
            return (RecordEnd(decision),)
        case _:
            return ()


def _missing_nodes(state: State) -> tuple[str, ...]:
    """The nodes of the allocation that no agent has come from."""
    present = {agent.candidate.node for agent in state.agents.values()}
    return tuple(node for node in state.settings.expected_nodes if node not in present and node not in state.gone_nodes)


_MISSING: dict[type[Question], Callable[[State], tuple[str, ...]]] = {
    ProbeMembers: missing,
    AskSlurmAboutAgents: missing,
    AskSlurmAboutNodes: _missing_nodes,
}
