"""A leader's term: in which order it writes, sends and asks. A pure state machine around the membership's.

An epoch (the number of a term) is claimed, and only then the last round is read; a round is written down, and only then
the newest epoch is read. So all that a leader sends to an agent was written down while its term was the newest, and the
agent that claims the next one finds it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.rendezvous.election.campaign import BLOCKING_LIMIT, seconds_of_questions
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


# Actions.


class Operation(enum.Enum):
    """A method of :class:`~slurm_elastic.rendezvous.leader.fenced_records.FencedRecords`."""

    TAKE = "take"
    CONFIRM = "confirm"
    PUBLISH_ENDPOINT = "publish_endpoint"
    LEADS = "leads"
    WRITE_ROUND = "write_round"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class UseRecords:
    """Do this with the records, and with a subject if it has one. Answered by RecordsAnswered or RecordsFailed.

    No decision waits for a reading that is `watching`.
    """

    operation: Operation
    subject: tuple[Table | events.Finish, ...] = ()
    watching: bool = False


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Carry out a decision that led to this state, and is on record if it has to be; `log` it in the log of the run.

    With the decision to claim the term this agent leads: the last round is confirmed, and the endpoint published.
    """

    state: State
    decision: events.Decision
    log: bool


class Question(enum.Enum):
    """A question about agents or nodes that are not here."""

    ENDED = "has it ended?"
    """To the nodes of missing members: which of their processes have ended?"""
    DISCONNECTED = "has it ended, too?"
    """The same of an agent whose connection broke. If it has, the leader does not wait for that to come back."""
    GONE = "is it gone?"
    """To Slurm: which of the missing members are gone?"""
    DOWN = "is it down?"
    """To Slurm: which of the allocation's missing nodes are down?"""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this about these agents or nodes. Answered by Answered."""

    question: Question
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepDown:
    """Lead no more. `why` is one line, empty after a resignation; a person has to fix something if it has `failed`."""

    why: str = ""
    failed: bool = False


TermAction = UseRecords | CarryOut | Ask | StepDown


# Events, beside those of the membership.


@dataclass(frozen=True, slots=True)
class RecordsAnswered:
    """An action on the records is through, and was allowed or not."""

    action: UseRecords
    allowed: bool


@dataclass(frozen=True, slots=True)
class RecordsFailed:
    """The records did not answer, or cannot be used: nothing is known of what a write did."""

    why: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The agents or nodes for which the answer to a question is yes."""

    question: Question
    names: frozenset[str]


TermEvent = events.Event | RecordsAnswered | RecordsFailed | Answered


@dataclass(frozen=True)
class Term:
    """One leader's term. Times are the leader's monotonic time.

    Attributes:
        deadline: when the machine has to see a Tick at the latest.
        tick_at: when the membership machine has to see it.
        queue: decisions that are not carried out yet, each with the state after it; a write to a shared file system
            can take long, and the membership goes on meanwhile.
        writing: what is still to be done with the records for the first of these; its first action is under way.
        asks_at: when to ask the questions whose answers matter now, and to read the newest term; infinite for what is
            under way.
        blocks_until: when this candidate steps down because it keeps members of the last round from each other; see
            :func:`~slurm_elastic.rendezvous.membership.leader_change.blocks_election`. Infinite while it does not.
        interrupted: the last round whose end is in the log of the run.
    """

    number: int
    membership: State
    deadline: float = -math.inf
    tick_at: float = -math.inf
    queue: tuple[tuple[State, events.Decision], ...] = ()
    writing: tuple[UseRecords, ...] = ()
    asks_at: Mapping[Question | Operation, float] = field(default_factory=dict)
    blocks_until: float = math.inf
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
    match event:
        case RecordsAnswered():
            turn.records_answered(event)
        case RecordsFailed(why):
            turn.step_down(StepDown(why, failed=True))
        case Answered():
            turn.answered(event)
        case events.Disconnected(agent):
            turn.happened(event)
            if agent in turn.state.broken:
                turn.actions.append(Ask(Question.DISCONNECTED, (agent,)))
        case events.Tick() if now < term.tick_at:
            pass
        case _:
            turn.happened(event)
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
        deadline = min(term.tick_at, term.blocks_until, *term.asks_at.values())
        self.change(queue=self.queue, writing=self.writing, deadline=deadline)
        return term

    def change(self, **changes: Any) -> None:
        self.term.__dict__.update(changes)

    # The membership.

    def happened(self, event: events.Event) -> None:
        self.state, decisions = membership_step(self.state, event, self.now)
        if decisions:
            self.queue += tuple((self.state, decision) for decision in decisions)
            self._carry_out()

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
            self.step_down(StepDown())

    def step_down(self, action: StepDown) -> None:
        self.change(over=True)
        self.actions.append(action)

    def records_answered(self, event: RecordsAnswered) -> None:
        action = event.action
        if action.watching:
            self._ask_again(Operation.LEADS, CHECK_TERM)
        elif not self.writing or action is not self.writing[0]:
            return
        if not event.allowed:
            self.step_down(StepDown(self._refused(action)))
        elif not action.watching:
            self.writing = self.writing[1:]
            if self.writing:
                self.actions.append(self.writing[0])
                return
            if isinstance(self.queue[0][1], events.Claim):
                self.state, decisions = membership_step(self.state, events.Claimed(), self.now)
                self.queue += tuple((self.state, decision) for decision in decisions)
            self._carried_out()
            self._carry_out()

    def _refused(self, action: UseRecords) -> str:
        match action:
            case UseRecords(Operation.TAKE | Operation.CONFIRM):
                return f"another agent has taken epoch {self.term.number}"
            case UseRecords(Operation.WRITE_ROUND):
                return f"round {self.queue[0][0].round} was published by another leader"
            case _:
                return "another agent leads with a newer epoch"

    # Questions of the leader to nodes and Slurm while a round is formed; there are none while no agent is missing.

    def find_out(self) -> None:
        if self.term.over:
            return
        state, term = self.state, self.term
        forming = state.phase is Phase.FORMING
        if not forming and not self.was_forming and not term.asks_at:
            return
        misses = misses_members(state)
        self._ask(Question.ENDED, misses, self._probe_pause())
        self._ask(Question.GONE, misses, ASK_SLURM_FIRST)
        self._ask(Question.DOWN, forming and bool(state.settings.expected_nodes), ASK_NODES_FIRST)
        self._ask(Operation.LEADS, forming, CHECK_TERM)
        if not blocks_election(state):
            self.change(blocks_until=math.inf)
        elif self.now >= term.blocks_until:
            self.step_down(StepDown("the members of the last round that have joined are no quorum"))
        else:
            self.change(blocks_until=min(term.blocks_until, self.now + BLOCKING_LIMIT))

    def _probe_pause(self) -> float:
        """Return the seconds in which missing members may come before the leader probes them."""
        state = self.state
        if state.base is None:
            return 0.0
        return seconds_of_questions(len(state.base.members) - len(state.agents) - len(state.gone))

    def _ask(self, question: Question | Operation, matters: bool, first: float) -> None:
        """Ask about those that are missing now, or later, or, if it does not matter, never.

        The first time comes `first` seconds after it matters.
        """
        at = self.term.asks_at.get(question)
        if at == math.inf:
            return
        if not matters:
            if at is not None:
                self.change(asks_at={other: at for other, at in self.term.asks_at.items() if other is not question})
        elif at is None and first > 0:
            self._ask_again(question, first)
        elif at is None or self.now >= at:
            # Looked up only now: there may be thousands, and this is decided after every event.
            names = _missing(self.state, question)
            self._ask_again(question, max(first, PROBE_AGAIN) if names is None else math.inf)
            if names is not None:
                self.actions.append(
                    Ask(question, names) if isinstance(question, Question) else UseRecords(question, watching=True)
                )

    def _ask_again(self, question: Question | Operation, seconds: float) -> None:
        self.change(asks_at={**self.term.asks_at, question: self.now + seconds})

    def answered(self, event: Answered) -> None:
        """Learn the answer to a question, and set the time of the next one."""
        names = event.names
        match event.question:
            case Question.DISCONNECTED:
                # An agent that has come back meanwhile has not ended: another machine with its address has refused.
                names = names.intersection(self.state.broken)
            case Question.ENDED:
                self._ask_again(event.question, max(PROBE_AGAIN, self._probe_pause()))
            case Question.GONE:
                self._ask_again(event.question, ASK_SLURM_AGAIN)
                # An agent that has come meanwhile is not gone, whatever Slurm says.
                names = names.intersection(missing(self.state))
            case Question.DOWN:
                self._ask_again(event.question, ASK_NODES_AGAIN)
        if names:
            self.happened(events.NodesDown(names) if event.question is Question.DOWN else events.Gone(names))


def _to_be_written(state: State, decision: events.Decision) -> tuple[UseRecords, ...]:
    """Return the writes to the records that come before the messages of a decision."""
    match decision:
        case events.Claim():
            # First no other leader tells an agent of a round that is not on record yet; then no round was written since
            # this candidate looked.
            return (UseRecords(Operation.TAKE), UseRecords(Operation.CONFIRM), UseRecords(Operation.PUBLISH_ENDPOINT))
        case events.Publish(table):
            return (
                UseRecords(Operation.LEADS),
                UseRecords(Operation.WRITE_ROUND, (table,)),
                UseRecords(Operation.LEADS),
            )
        case events.Finish() if state.claimed:
            return (UseRecords(Operation.FINISH, (decision,)),)
        case _:
            return ()


def _missing(state: State, question: Question | Operation) -> tuple[str, ...] | None:
    """Return the agents or nodes that a question is about; None if there is nothing to ask now."""
    match question:
        case Operation():
            return () if state.claimed else None
        case Question.DOWN:
            here = {agent.candidate.node for agent in state.agents.values()}
            nodes = state.settings.expected_nodes
            return tuple(node for node in nodes if node not in here and node not in state.gone_nodes) or None
        case _:
            return missing(state) or None
