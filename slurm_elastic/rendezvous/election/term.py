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

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.election.policy import seconds_of_questions
from slurm_elastic.rendezvous.election.term_events import (
    AgentsEnded,
    AgentsGone,
    AskSlurmAboutAgents,
    AskSlurmAboutNodes,
    CarryOut,
    CheckTerm,
    ClaimTerm,
    ConfirmLastRound,
    DisconnectedEnded,
    ProbeDisconnected,
    ProbeMembers,
    PublishEndpoint,
    Question,
    RecordEnd,
    RecordsAction,
    RecordsAnswered,
    RecordsFailed,
    ReportBlocking,
    ReportClaimed,
    StepDown,
    TermAction,
    TermEvent,
    Wake,
    WriteRound,
)
from slurm_elastic.rendezvous.membership import (
    Claim,
    Claimed,
    Decision,
    Finish,
    Gone,
    Interrupt,
    NodesDown,
    Phase,
    Publish,
    Resign,
    Settings,
    State,
    replace,
)

PROBE_AGAIN = 0.2
"""Seconds between two probes of members that are missing; of thousands, as long as these take to come by themselves."""
ASK_SLURM_FIRST, ASK_SLURM_AGAIN = 0.2, 5.2
"""Seconds until the leader asks Slurm about missing members: by then their nodes have answered which have ended."""
ASK_NODES_FIRST, ASK_NODES_AGAIN = 1.0, 5.0
"""The same for nodes of the allocation that are missing."""
CHECK_TERM = 1.0
"""Seconds between two readings of the newest term while a round is formed."""


@dataclass(frozen=True)
class Term:
    """One leader's term. Times are the leader's monotonic time.

    Attributes:
        number: of the term.
        membership: state of the membership machine.
        deadline: when the machine has to see a Wake at the latest.
        tick_at: when the membership machine has to see a Tick.
        queue: decisions that are not carried out yet, each with the state after it.
        writing: what is still to be done with the records for the first of these; its first action is under way.
        probe_at, ask_agents_at, ask_nodes_at, check_at: when to find out more; infinite while that is not wanted, or
            under way.
        blocks: whether this candidate was last reported to block others.
        interrupted: the last round whose end is in the log of the run.
        over: whether it leads no more.
    """

    number: int
    membership: State
    deadline: float = -math.inf
    tick_at: float = -math.inf
    queue: tuple[tuple[State, Decision], ...] = ()
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
    return Term(number, membership.initial_state(settings, now))


def step(term: Term, event: TermEvent, now: float) -> tuple[Term, tuple[TermAction, ...]]:
    """Process one event.

    Args:
        term: as the last step left it.
        event: what happened.
        now: the leader's monotonic time.

    Returns:
        The next state, and what has to be done, in order.
    """
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
            self.change(membership=self.state, tick_at=membership.next_deadline(self.state))
        self.change(
            queue=self.queue,
            writing=self.writing,
            deadline=min(term.tick_at, term.probe_at, term.ask_agents_at, term.ask_nodes_at, term.check_at),
        )
        return term

    def change(self, **changes: Any) -> None:
        self.term.__dict__.update(changes)

    # The membership.

    def happened(self, event: membership.Event) -> None:
        self.state, decisions = membership.step(self.state, event, self.now)
        if decisions:
            self.queue += tuple((self.state, decision) for decision in decisions)
            self._carry_out()

    def wake(self, event: Wake) -> None:
        if self.now >= self.term.tick_at:
            self.happened(membership.Tick())

    def disconnected(self, event: membership.Disconnected) -> None:
        self.happened(event)
        if event.agent in self.state.broken:
            self.actions.append(ProbeDisconnected(event.agent))

    def disconnected_ended(self, event: DisconnectedEnded) -> None:
        # An agent that has come back meanwhile has not ended: another machine with its address has refused.
        if event.agent in self.state.broken:
            self.happened(Gone(frozenset({event.agent})))

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
        if isinstance(decision, Interrupt):
            # A leader that follows another one interrupts each member separately, and logs that once.
            log = decision.message.round > self.term.interrupted
            self.change(interrupted=max(self.term.interrupted, decision.message.round))
        self.actions.append(CarryOut(state, decision, log))
        if isinstance(decision, Resign):
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
            if isinstance(self.queue[0][1], Claim):
                self.actions.append(ReportClaimed())
                self.state, decisions = membership.step(self.state, Claimed(), self.now)
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
        misses = membership.misses_members(state)
        self._ask("probe_at", ProbeMembers, misses, self._probe_pause(), PROBE_AGAIN)
        self._ask("ask_agents_at", AskSlurmAboutAgents, misses, ASK_SLURM_FIRST, ASK_SLURM_FIRST)
        expects = forming and bool(state.settings.expected_nodes)
        self._ask("ask_nodes_at", AskSlurmAboutNodes, expects, ASK_NODES_FIRST, ASK_NODES_FIRST)
        self._check_term(forming)
        if not state.claimed or self.term.blocks:
            blocks = membership.blocks_election(state)
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
        """Ask about those that are missing now, or later, or never.

        Args:
            moment: field of the term that says when.
            kind: of the question.
            is_due: whether it matters.
            first: seconds until that is asked once it matters.
            again: seconds until the next look if no agent or node is missing.
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
            self.happened(Gone(event.agents))

    def agents_gone(self, event: AgentsGone) -> None:
        self._answered(AskSlurmAboutAgents)
        self.change(ask_agents_at=self.now + ASK_SLURM_AGAIN)
        # An agent that has come meanwhile is not gone, whatever Slurm says.
        gone = event.agents.intersection(membership.missing(self.state))
        if gone:
            self.happened(Gone(gone))

    def nodes_down(self, event: NodesDown) -> None:
        self._answered(AskSlurmAboutNodes)
        self.change(ask_nodes_at=self.now + ASK_NODES_AGAIN)
        if event.down:
            self.happened(event)


_HANDLERS: dict[type, Callable[[_Step, Any], None]] = {
    Wake: _Step.wake,
    RecordsAnswered: _Step.answered,
    RecordsFailed: _Step.failed,
    membership.Disconnected: _Step.disconnected,
    DisconnectedEnded: _Step.disconnected_ended,
    AgentsEnded: _Step.agents_ended,
    AgentsGone: _Step.agents_gone,
    NodesDown: _Step.nodes_down,
}


def _to_be_written(state: State, decision: Decision) -> tuple[RecordsAction, ...]:
    """Return the writes to the records that come before the messages of a decision."""
    match decision:
        case Claim():
            # First no other leader tells an agent of a round that is not on record yet; then no round was written since
            # this candidate looked.
            return (ClaimTerm(), ConfirmLastRound(), PublishEndpoint())
        case Publish(table):
            return (CheckTerm(), WriteRound(table), CheckTerm())
        case Finish() if state.claimed:
            return (RecordEnd(decision),)
        case _:
            return ()


def _missing_nodes(state: State) -> tuple[str, ...]:
    """The nodes of the allocation that no agent has come from."""
    present = {agent.candidate.node for agent in state.agents.values()}
    return tuple(node for node in state.settings.expected_nodes if node not in present and node not in state.gone_nodes)


_MISSING: dict[type[Question], Callable[[State], tuple[str, ...]]] = {
    ProbeMembers: membership.missing,
    AskSlurmAboutAgents: membership.missing,
    AskSlurmAboutNodes: _missing_nodes,
}
