"""Mistakes that the product could have, each of which the simulation has to find.

    python3 -m tests.simulation --mutations

counts in how many schedules each is found, and by which promise. The mistakes in decisions about snapshots are in
`snapshot_mutations.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_elastic.control.agent_side import Agreement
from slurm_elastic.control.shared_page import BOUNDARY, HOLD
from slurm_elastic.control.worker_side import Stop, WorkerControl
from slurm_elastic.rendezvous.election import due, term
from slurm_elastic.rendezvous.election import machine as election
from slurm_elastic.rendezvous.election import state as election_state
from slurm_elastic.rendezvous.election.follower import Follower
from slurm_elastic.rendezvous.election.leader_location import Leadership
from slurm_elastic.rendezvous.election.term import Operation, UseRecords
from slurm_elastic.rendezvous.leader import fenced_records
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords, LastRound
from slurm_elastic.rendezvous.membership import advance, leader_change, machine, planned_stop, transitions
from slurm_elastic.rendezvous.membership import config as quorum
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Status
from slurm_elastic.rendezvous.membership.assignment import Table
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.events import (
    Claim,
    Connected,
    Decision,
    Interrupt,
    Joined,
    Publish,
    Resign,
    Resigned,
)
from slurm_elastic.rendezvous.membership.state import Phase, State, with_agent
from tests.simulation import replicas, shrink, snapshots
from tests.simulation.drawing import draw, draw_sizes
from tests.simulation.election import agent, faults
from tests.simulation.election.checks import Checks
from tests.simulation.election.records import Records
from tests.simulation.interleaving import Memory
from tests.simulation.leader import SimulatedLeader
from tests.simulation.schedules import play_script, sizes
from tests.simulation.stopping import StopSchedule
from tests.simulation.violation import Violation, violation_of

MESSAGES = 60
"""Of a script that are struck when mistakes are looked for."""

Play = Callable[[int], Violation | None]
Make = Callable[[pytest.MonkeyPatch], None]


def one_leader(number: int) -> Violation | None:
    """Play a schedule with one leader that never dies."""
    return shrink.play(draw(number))


def some_sizes(number: int) -> Violation | None:
    """Play a schedule of nodes that come and go, with a script that can use some numbers of nodes only."""
    return shrink.play(draw_sizes(number))


def several_leaders(number: int) -> Violation | None:
    """Play a random schedule, or a struck script, with several possible leaders."""
    if number % 2:
        return play_script(faults.draw(number // 2))
    rng = random.Random(number)
    return play_script(faults.strike(faults.script(number), rng.randint(1, 80), rng.choice(faults.STRIKES)))


def random_faults(number: int) -> Violation | None:
    """Play a random schedule with several possible leaders."""
    return play_script(faults.draw(number))


def rounds_with_snapshots(number: int) -> Violation | None:
    """Play rounds of nodes that take snapshots and write checkpoints."""
    return violation_of(lambda: snapshots.play(number))


def copies(number: int) -> Violation | None:
    """Play rounds of nodes whose parts of snapshots are copied to other nodes."""
    return violation_of(lambda: replicas.play(number))


def copies_in_two_slots(number: int) -> Violation | None:
    """The same with two slots on each node."""
    return violation_of(lambda: replicas.play(number, (2,)))


def sizes_and_leaders(number: int) -> Violation | None:
    """Play a schedule with several possible leaders, and a script that can use some numbers of nodes only."""
    return play_script(sizes(number))


def stop_step(**mistake: Any) -> Play:
    """Let the workers of a round stop at one step, with a mistake in the code that is played."""

    def play(number: int) -> Violation | None:
        try:
            StopSchedule(number, **mistake).play()
        except (AssertionError, ValueError) as error:
            return Violation("all workers stop at one step", str(error))
        return None

    return play


def strikes_of(script: faults.Script) -> Play:
    """All that can happen to the leader at the messages of a script, one seed after the other, for a mistake that
    rarely does harm."""

    def play(number: int) -> Violation | None:
        further, number = divmod(number, MESSAGES * len(faults.STRIKES))
        message, kind = divmod(number, len(faults.STRIKES))
        again = replace(script, seed=script.seed + further)
        return play_script(faults.strike(again, message + 1, faults.STRIKES[kind]))

    return play


def after(first: int, play: Play) -> Play:
    """The same schedules without those before the first that counts, for the same."""
    return lambda number: play(first + number)


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        what: is broken.
        promises: of which one is broken then.
        make: makes it.
        play: plays the schedule of a number, of those among which it is looked for.
        rare: whether it does harm so rarely that these are schedules that come near it.
    """

    what: str
    promises: tuple[str, ...]
    make: Make
    play: Play
    rare: bool = False

    def violations(self, schedules: int) -> Iterator[Violation | None]:
        """Play schedules with this mistake; what each breaks."""
        with pytest.MonkeyPatch.context() as patch:
            self.make(patch)
            for number in range(schedules):
                yield self.play(number)


COMMON = (several_leaders, random_faults, one_leader, rounds_with_snapshots, copies, copies_in_two_slots)
"""Schedules that come near no mistake more than others do."""


MUTATIONS: dict[str, Mutation] = {}


def mutation(
    what: str, *promises: str, of: tuple[Any, Any] | None = None, among: Play = several_leaders
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Note a mistake that a function makes, or that is a function: called instead `of` another, which it gets first."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        rare = among not in COMMON
        make = function if of is None else lambda patch: exchange(patch, *of, function)
        MUTATIONS[what] = Mutation(what, promises, make, among, rare)
        return function

    return note


def exchange(patch: pytest.MonkeyPatch, owner: Any, name: Any, wrong: Callable[..., Any]) -> None:
    """Have a function called in the place of one of a module, a class or a dict; it gets that one first."""
    if isinstance(owner, dict):
        patch.setitem(owner, name, partial(wrong, owner[name]))
        return
    right = getattr(owner, name)
    if isinstance(right, property):
        patch.setattr(owner, name, property(lambda own: wrong(right, own)))
    else:
        patch.setattr(owner, name, lambda *arguments, **options: wrong(right, *arguments, **options))


ALONE = faults.Script(7, 3, (faults.Fault(1.15, "leave", 0, 6.0),), late=((1, 1.1), (2, 1.1)))
"""One agent trains alone, and is told to go when two others have just come."""


LEADER_LEAVES = faults.script(12)
"""The leader of four agents is told to go."""


FAILS = faults.failing(4)
"""A worker fails by itself."""


UNPUBLISHED = faults.Script(3, 3, (), store=True, late=((1, 1.1),))
"""One agent trains alone when another comes; somebody leads who is no member, and so is in nobody's order."""


# Who may go on.


@mutation(
    "one member of the last round is enough",
    "a majority goes on",
    "of two halves one goes on",
    of=(quorum, "has_quorum"),
    among=random_faults,
)
def one_is_enough(right: Any, base: Any, present: Any, *arguments: Any, **options: Any) -> bool:
    here = base is not None and any(name in present for name in base.members)
    return here or right(base, present, *arguments, **options)


@mutation("nobody of the last round is needed", "one group trains", among=strikes_of(ALONE))
def quorum_of_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "has_quorum", lambda *_, **__: True)
    # What comes of it, and not just that it is so.
    patch.setattr(Checks, "_check_majority", lambda *_: None)


@mutation("either half goes on", "of two halves one goes on", of=(quorum, "has_quorum"), among=random_faults)
def either_half_goes_on(right: Any, base: Any, present: Any, gone: Any, *arguments: Any, **options: Any) -> bool:
    if right(base, present, gone, *arguments, **options):
        return True
    rest = [name for name in base.members if name not in gone]
    return bool(rest) and 2 * sum(name in present for name in rest) == len(rest)


@mutation(
    "a leave counts as gone before its workers have stopped", "one group trains", among=after(2000, strikes_of(ALONE))
)
def leaves_count_at_once(patch: pytest.MonkeyPatch) -> None:
    retire, leaves = transitions.retire, leader_change.absent_member_leaves
    patch.setattr(transitions, "retire", lambda *arguments, lingers=False: retire(*arguments))
    patch.setattr(
        leader_change,
        "absent_member_leaves",
        lambda state, event: replace(leaves(state, event), lingering=frozenset()),
    )


# One leader after the other.


@mutation(
    "a new leader does not look at the last round after its claim",
    "a new leader knows every round",
    among=strikes_of(LEADER_LEAVES),
)
def no_look_after_the_claim(patch: pytest.MonkeyPatch) -> None:
    without(patch, Claim, Operation.CONFIRM)


@mutation("a leader publishes without a look at the newest epoch", "a superseded leader publishes nothing")
def no_look_at_the_epoch(patch: pytest.MonkeyPatch) -> None:
    without(patch, Publish, Operation.LEADS)
    patch.setattr(FencedRecords, "leads", lambda ledger: True)


@mutation(
    "a leader looks at the newest epoch only before it writes",
    "a superseded leader publishes nothing",
    of=(FencedRecords, "write_round"),
)
def no_second_look_at_the_epoch(right: Any, ledger: Any, table: Table) -> bool:
    ledger.leads = lambda: True
    return right(ledger, table)


def without(patch: pytest.MonkeyPatch, kind: type, operation: Operation) -> None:
    """Before a decision of this kind is told, this is not done with the records."""

    def to_be_written(right: Any, state: State, decision: Decision) -> tuple[UseRecords, ...]:
        actions = right(state, decision)
        return tuple(each for each in actions if each.operation is not operation or not isinstance(decision, kind))

    exchange(patch, term, "_to_be_written", to_be_written)


def change_joins(patch: pytest.MonkeyPatch, change: Callable[[State, Joined], Joined]) -> None:
    """Let the leader take other joins than those that come."""

    exchange(patch, machine._HANDLERS, Joined, lambda right, state, event, now: right(state, change(state, event), now))


@mutation(
    "a leader that is lost before it published is taken for the one before it",
    "of two halves one goes on",
    among=after(106800, random_faults),
)
def takes_one_leader_for_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(due.Due, "_agent_at", lambda turn, endpoint, order: turn.state.known.leader)


@mutation(
    "epochs fence nobody, and rounds on record can be replaced",
    "a round is told once",
    "one group trains",
    among=random_faults,
)
def nothing_is_exclusive(patch: pytest.MonkeyPatch) -> None:
    no_look_at_the_epoch(patch)
    no_look_after_the_claim(patch)
    claim = Records.claim_round
    patch.setattr(Records, "claim_round", lambda records, number, record: claim(records, number, record) or True)


@mutation(
    "a leader resigns while its own agent has workers",
    "one group trains",
    of=(leader_change, "resign"),
    among=after(2000, strikes_of(ALONE)),
)
def resigns_too_soon(_: Any, state: State) -> Any:
    resigned = Resign(tuple(state.agents), Resigned(state.settings.agent), everyone=True)
    return replace(state, phase=Phase.CLOSED), (resigned,)


@mutation(
    "a new leader goes by the restarts on record alone",
    "restarts are one number for the run",
    among=strikes_of(FAILS),
)
def forgets_a_charge(patch: pytest.MonkeyPatch) -> None:
    change_joins(patch, lambda state, event: replace(event, restarts=0))


@mutation(
    "a leader does not compare a failure with the last one",
    "the last failure is on record",
    "the same failure twice in a row ends the run",
    of=(advance, "_charge"),
    among=one_leader,
)
def forgets_the_last_failure(right: Any, state: State, now: float) -> Any:
    return right(replace(state, last_failure=""), now)


# Silence.


@mutation(
    "workers are not stopped while the leader is silent",
    "who hears no leader stops by itself",
    of=(election._Step, "_fence"),
)
def no_fence(right: Any, step: Any, why: str) -> Any:
    return None if why == "the leader is silent" else right(step, why)


@mutation("an agent that was cut off does not say so when it joins again", "what is said of a round is true")
def cut_off_in_secret(patch: pytest.MonkeyPatch) -> None:
    change_joins(patch, lambda state, event: replace(event, cut_off=False))


@mutation("a member follows before leader_limit", "a leader that is well is not followed", among=random_faults)
def follows_too_soon(patch: pytest.MonkeyPatch) -> None:
    for module in (agent, election_state):
        patch.setattr(module, "default_leader_limit", lambda heartbeat_limit: 0.9 * heartbeat_limit)


@mutation(
    "candidates go by the round they were told of, not by the newest on record",
    "the run trains again",
    among=strikes_of(UNPUBLISHED),
)
def goes_by_an_old_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leadership, "order", lambda told, seen: told.successors or seen.successors)


# Numbers of nodes.


@mutation(
    "every new node ends the round", "a round ends for new nodes only if the next one is larger", among=one_leader
)
def every_newcomer_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "makes_larger", lambda state: len(state.agents) > len(state.table.places))


@mutation(
    "a round takes all that have joined",
    "a round takes the largest valid number",
    of=(Settings, "round_size"),
    among=one_leader,
)
def takes_any_number(_: Any, settings: Settings, agents: int) -> int:
    return min(agents, settings.max_nodes) if agents >= settings.min_nodes else 0


@mutation("a round cuts segments", "segments are whole", among=one_leader)
def cuts_segments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "members_by_segment", lambda agents, segment, size: agents[:size])


@mutation(
    "a leader counts nodes of which no segment comes",
    "a round takes the largest valid number",
    "a round ends for new nodes only if the next one is larger",
    "no wait that is not needed",
    among=one_leader,
)
def counts_all_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "usable", property(lambda state: len(state.agents)))


@mutation("ranks follow Slurm's order alone", "ranks of a domain are beside each other", among=one_leader)
def ignores_domains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentInfo, "order", property(lambda candidate: (candidate.position, candidate.node, candidate.agent)))


@mutation(
    "a failure is charged, also if the script cannot use the number of nodes",
    "only workers that fail by themselves are charged",
    among=some_sizes,
)
def charges_any_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "is_unusable", lambda state: False)


@mutation(
    "a failure after the first step is taken for one of the number of nodes",
    "a worker failure is charged or explained",
    among=some_sizes,
)
def charges_no_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "is_unusable", lambda state: state.inquest is not None)


@mutation(
    "a number of nodes that the script cannot use is tried again",
    "a round takes the largest valid number",
    among=some_sizes,
)
def tries_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "round_size", lambda state, agents: state.settings.round_size(agents))


@mutation(
    "a failure is judged before other nodes can fail by the number of nodes, too",
    "only workers that fail by themselves are charged",
    among=some_sizes,
)
def judges_too_soon(patch: pytest.MonkeyPatch) -> None:
    hasty = SimpleNamespace(**{**vars(transitions), "may_be_unusable": lambda state: False})
    patch.setattr(advance, "transitions", hasty)


@mutation(
    "a leader does not learn which rounds have worked",
    "only workers that fail by themselves are charged",
    among=some_sizes,
)
def learns_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "learn", lambda state, event, agent: (state, agent))


@mutation(
    "a new leader does not know which numbers of nodes have worked",
    "only workers that fail by themselves are charged",
    of=(fenced_records, "last_round"),
    among=after(200, sizes_and_leaders),
)
def forgets_what_worked(right: Any, *arguments: Any) -> LastRound | None:
    last = right(*arguments)
    return last and replace(last, ran=())


@mutation(
    "an agent that has trained does not tell the next leader but one",
    "only workers that fail by themselves are charged",
    among=after(600, sizes_and_leaders),
)
def forgets_who_trained(patch: pytest.MonkeyPatch) -> None:
    change_joins(patch, lambda state, event: replace(event, candidate=replace(event.candidate, proven=False)))


@mutation(
    "a failure counts for a new node's own while others have stopped their workers",
    "only workers that fail by themselves are charged",
    of=(advance, "_cut_off"),
    among=after(1800, sizes_and_leaders),
)
def judges_stopped_workers(right: Any, state: State) -> str | None:
    return right(state) if state.inquest is not None and state.inquest.failure.consequence else None


# Places.


@mutation(
    "an agent takes a place that answers an earlier join",
    "one group trains",
    of=(Follower, "placed"),
    among=one_leader,
)
def any_attempt_will_do(right: Any, follower: Follower, attempt: int, round_: int) -> Follower | None:
    return right(follower, follower.attempt, round_)


@mutation(
    "a table is sent to an agent that has joined again since it was made",
    "one group trains",
    of=(SimulatedLeader, "_send_place"),
    among=after(1900, one_leader),
)
def sent_whatever_came_since(right: Any, leader: SimulatedLeader, state: State, agent: str, table: Table) -> None:
    right(leader, leader.state if agent in leader.state.agents else state, agent, table)


@mutation("a table is sent again to an agent that has stopped its workers", "the run does not settle", among=one_leader)
def resent_to_stopped_agents(patch: pytest.MonkeyPatch) -> None:
    def joined(state: State, event: Joined) -> Joined:
        known = state.agents.get(event.candidate.agent)
        of_this_round = known is not None and state.table is not None and known.round == state.table.round
        return replace(event, last_round=None) if of_this_round else event

    change_joins(patch, joined)


@mutation(
    "a round does not wait for old workers", "one group trains", of=(transitions, "start_forming"), among=one_leader
)
def waits_for_no_old_workers(right: Any, *arguments: Any, **options: Any) -> Any:
    after, decisions = right(*arguments, **options)
    for known in after.agents.values():
        if known.status is Status.STOPPING:
            after = with_agent(after, replace(known, status=Status.WAITING))
    return after, decisions


@mutation(
    "a lost node is charged",
    "only workers that fail by themselves are charged",
    of=(advance, "_inquest_due"),
    among=one_leader,
)
def charges_a_lost_node(_: Any, state: State) -> float:
    return math.inf if state.inquest is None else state.inquest.since + state.settings.settle_time


@mutation(
    "an agent that connects again is not told that its round is over",
    "the run does not settle",
    "the run does not end",
    of=(machine._HANDLERS, Connected),
    among=one_leader,
)
def interrupts_none_again(right: Any, state: State, event: Connected, now: float) -> Any:
    after, decisions = right(state, event, now)
    return after, tuple(each for each in decisions if not isinstance(each, Interrupt))


@mutation(
    "a round ends although more are on their way",
    "joins that are close together make one round",
    of=(transitions, "_more_to_come"),
    among=one_leader,
)
def waits_for_no_more(_: Any, state: State) -> bool:
    return False


@mutation(
    "all are told to stop at the earliest answer",
    "nobody passes the agreed step",
    "all stop at one step",
    # A rank that waits at the later step waits for ever.
    "the run does not settle",
    among=one_leader,
)
def stops_at_the_earliest_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planned_stop, "max", min, raising=False)


@mutation(
    "a round ends with the first that has stopped",
    "a planned end is not broken off without a reason",
    of=(planned_stop, "advance"),
    among=one_leader,
)
def ends_with_the_first(right: Any, state: State, now: float) -> Any:
    after, decisions = right(state, now)
    planned = after.planned_stop is not None and after.planned_stop.stop is not None
    stopped = any(known.status is Status.WAITING and after.is_member(known) for known in after.agents.values())
    return planned_stop.end(after, now) if planned and stopped else (after, decisions)


# The step at which workers stop.


class _OneTooEarly(Agreement):
    def hold(self) -> int | None:
        first = self._earliest is None
        answer = super().hold()
        if first and answer is not None and answer > 1:
            self._earliest = answer = answer - 1
        return answer


class _NoSecondBarrier(Agreement):
    def _barrier(self) -> None:
        if self._earliest is None:
            super()._barrier()


class _ReadsFirst(WorkerControl):
    def ask(self, step: int | None = None) -> Stop | None:
        held = self._fields[HOLD]
        self._boundary += 1
        self._fields[BOUNDARY] = self._boundary
        return self._wait(self._boundary) if held else None


class _ReportsLate(WorkerControl):
    def ask(self, step: int | None = None) -> Stop | None:
        self._boundary += 1
        stop = self._wait(self._boundary) if self._fields[HOLD] else None
        self._fields[BOUNDARY] = self._boundary
        return stop


def _no_barrier(memory: Memory) -> None:
    pass


for _what, _mistake in (
    ("an agent names a step that a worker has passed", {"agreement": _OneTooEarly}),
    ("the stop step is set without a barrier after its reason", {"agreement": _NoSecondBarrier}),
    ("a worker reads the hold flag before it reports its call", {"worker": _ReadsFirst}),
    ("a worker reports its call after it has read the hold flag", {"worker": _ReportsLate}),
    ("an agent reads calls without a barrier after the hold flag", {"barrier": _no_barrier}),
    ("a second leader lets workers go that have a stop step", {"forgetful": True}),
):
    MUTATIONS[_what] = Mutation(_what, ("all workers stop at one step",), lambda patch: None, stop_step(**_mistake))
