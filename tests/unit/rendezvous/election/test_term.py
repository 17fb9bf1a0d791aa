"""The order in which a leader writes down and tells, and what it finds out while it forms a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.election import term
from slurm_elastic.rendezvous.election.term import (
    ASK_SLURM_FIRST,
    CHECK_TERM,
    PROBE_AGAIN,
    AgentsEnded,
    AgentsGone,
    AskSlurmAboutAgents,
    AskSlurmAboutNodes,
    CarryOut,
    CheckTerm,
    ClaimTerm,
    ConfirmLastRound,
    DisconnectedEnded,
    NodesDown,
    ProbeDisconnected,
    ProbeMembers,
    PublishEndpoint,
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
    Base,
    Claim,
    Finish,
    Finished,
    Interrupt,
    Joined,
    LeaveReason,
    Leaving,
    Left,
    Publish,
    Resign,
    Settings,
    SignsOfLife,
)
from tests.unit.rendezvous.helpers.scenario import candidate

Kind = TypeVar("Kind", bound=TermAction)

LAST = Base(4, ("n0", "n1", "n2"), ("n0", "n1", "n2"), "n0")
"""The last round, which the first of its members led."""


class Play:
    """A leader on n1, whose records answer what a test lets them."""

    def __init__(self, **settings: object) -> None:
        self.now = 1000.0
        options = {"min_nodes": 1, "max_nodes": 8, "agent": "n1", **settings}
        self.term = term.initial_term(7, Settings(**options), self.now)  # type: ignore[arg-type]
        self.on(membership.Tick())

    def on(self, event: TermEvent) -> list[TermAction]:
        self.term, actions = term.step(self.term, event, self.now)
        return [*actions]

    def join(self, *names: str) -> list[TermAction]:
        return [action for name in names for action in self.on(Joined(candidate(name), 1))]

    def answer(self, action: TermAction, *, allowed: bool = True) -> list[TermAction]:
        return self.on(RecordsAnswered(action, allowed))  # type: ignore[arg-type]

    def wait(self, seconds: float) -> list[TermAction]:
        """Time goes by, in which all agents give signs of life."""
        actions: list[TermAction] = []
        end = self.now + seconds
        while self.term.deadline <= end:
            self.now = max(self.now, self.term.deadline)
            actions += self.on(SignsOfLife(tuple((name, self.now) for name in self.term.membership.agents)))
            actions += self.on(Wake())
            assert self.term.deadline > self.now, "it would look at its clock without end"
        self.now = end
        return actions

    def write(self, action: TermAction) -> list[TermAction]:
        """The records allow everything."""
        actions = self.answer(action)
        while actions and isinstance(actions[0], RecordsAction) and actions[0] != CheckTerm(watching=True):
            actions = self.answer(actions[0])
        return actions


def of(kind: type[Kind], actions: list[TermAction]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def decisions(actions: list[TermAction]) -> list[type]:
    return [type(action.decision) for action in of(CarryOut, actions)]


def candidacy(**settings: object) -> Play:
    """A candidate that waits for a quorum of the last round."""
    return Play(base=LAST, first_round=5, claimed=False, **settings)


def test_a_candidate_claims_then_confirms_then_publishes_and_only_then_leads() -> None:
    play = candidacy()
    assert of(ClaimTerm, play.join("n1")) == []
    (claim,) = of(ClaimTerm, play.join("n2"))
    (confirm,) = play.answer(claim)
    assert confirm == ConfirmLastRound()
    (publish,) = play.answer(confirm)
    assert publish == PublishEndpoint()
    assert not play.term.membership.claimed
    actions = play.answer(publish)
    assert actions[0] == ReportClaimed()
    assert decisions(actions) == [Claim]
    assert play.term.membership.claimed


@pytest.mark.parametrize("refused", [ClaimTerm, ConfirmLastRound])
def test_a_candidate_that_comes_too_late_steps_down_and_tells_nothing(refused: type) -> None:
    play = candidacy()
    (action, *_) = of(ClaimTerm, play.join("n1", "n2"))
    actions: list[TermAction] = [action]
    while not isinstance(actions[0], refused):
        actions = play.answer(actions[0])
    assert play.answer(actions[0], allowed=False) == [StepDown("another agent has taken epoch 7")]
    assert play.on(Wake()) == []


def forming() -> tuple[Play, CheckTerm]:
    """A leader that is about to write its first round."""
    play = Play()
    (check,) = of(CheckTerm, play.join("n1"))
    return play, check


def test_a_round_is_told_after_it_was_written_between_two_looks_at_the_newest_term() -> None:
    play, check = forming()
    (write,) = play.answer(check)
    assert isinstance(write, WriteRound)
    (again,) = play.answer(write)
    assert again == CheckTerm()
    assert decisions(play.answer(again)) == [Publish]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_superseded_leader_tells_nobody_of_a_round(refused: int) -> None:
    play, action = forming()
    actions: list[TermAction] = [action]
    for _ in range(refused):
        actions = play.answer(actions[0])
    (down,) = play.answer(actions[0], allowed=False)
    assert isinstance(down, StepDown)
    assert not down.failed


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_nothing_is_told_of_a_round_of_which_it_is_not_known_whether_it_is_on_record(failed: int) -> None:
    play, action = forming()
    actions: list[TermAction] = [action]
    for _ in range(failed):
        actions = play.answer(actions[0])
    asked = actions[0]
    assert play.on(RecordsFailed(asked, "the disk is full")) == [StepDown("the disk is full", failed=True)]  # type: ignore[arg-type]
    # What becomes of it later is of no use.
    assert play.answer(asked) == []


def test_what_is_decided_while_a_round_is_written_waits_its_turn() -> None:
    play, check = forming()
    # It leaves: the round that is being written would have to end again.
    assert of(CarryOut, play.on(Leaving("n1", LeaveReason.PREEMPTED))) == []
    assert of(CarryOut, play.on(Left("n1", LeaveReason.PREEMPTED))) == []
    actions = play.write(check)
    assert decisions(actions)[0] is Publish
    assert decisions(actions)[1:]


def test_an_answer_that_comes_late_belongs_to_what_was_asked() -> None:
    play, check = forming()
    (write,) = play.answer(check)
    # The first look once more: not the second one.
    assert play.answer(check) == []
    assert isinstance(write, WriteRound)


def test_a_leader_that_resigns_tells_so_and_steps_down() -> None:
    play, check = forming()
    play.write(check)
    play.on(Leaving("n1", LeaveReason.PREEMPTED))
    actions = play.on(Left("n1", LeaveReason.PREEMPTED))
    assert decisions(actions)[-1] is Resign
    assert actions[-1] == StepDown()


def test_the_end_is_written_down_before_it_is_told() -> None:
    play, check = forming()
    play.write(check)
    (end,) = play.on(Finished("n1", 0))
    assert isinstance(end, RecordEnd)
    assert decisions(play.answer(end)) == [Finish]


def test_the_log_of_the_run_is_told_once_that_a_round_is_over() -> None:
    play = candidacy()
    actions = [action for name in ("n1", "n2") for action in play.on(membership.Connected(name, running=4))]
    interrupts = [action for action in of(CarryOut, actions) if isinstance(action.decision, Interrupt)]
    assert [action.log for action in interrupts] == [True, False]


# What it finds out by itself.


def test_members_that_are_missing_are_probed_again_and_again_and_slurm_is_asked_a_little_later() -> None:
    play = candidacy()
    # The first step has asked already, and nothing is asked twice.
    assert play.term.asking == {ProbeMembers}
    assert of(AskSlurmAboutAgents, play.wait(ASK_SLURM_FIRST)) == [AskSlurmAboutAgents(LAST.members)]
    play.on(AgentsEnded(frozenset()))
    assert of(ProbeMembers, play.wait(PROBE_AGAIN)) == [ProbeMembers(LAST.members)]
    play.on(AgentsGone(frozenset({"n0"})))
    play.on(AgentsEnded(frozenset({"n2"})))
    assert play.term.membership.gone == {"n0", "n2"}
    # One member is left.
    assert of(ClaimTerm, play.join("n1"))


def test_thousands_of_missing_members_may_come_by_themselves_before_they_are_probed() -> None:
    members = tuple(f"n{rank}" for rank in range(4608))
    play = Play(base=Base(4, members, members, "n0"), first_round=5, claimed=False)
    assert of(ProbeMembers, play.wait(0.9)) == []
    play.join("n2")
    assert of(ProbeMembers, play.wait(0.2)) == [ProbeMembers(tuple(name for name in members if name != "n2"))]
    play.on(AgentsEnded(frozenset()))
    assert of(ProbeMembers, play.wait(0.9)) == []
    play.on(AgentsGone(frozenset(members[3:])))
    play.on(AgentsEnded(frozenset()))
    assert of(ProbeMembers, play.wait(0.2)) == [ProbeMembers(("n0", "n1"))]


@pytest.mark.parametrize("agent", ["m0", "coordinator"])
def test_members_that_come_one_after_the_other_are_not_all_looked_at_each_time(agent: str) -> None:
    class Members(tuple[str, ...]):
        """Names that count how often they are walked over or searched."""

        walks = 0

        def __iter__(self) -> Iterator[str]:
            Members.walks += 1
            return super().__iter__()

        def __contains__(self, name: object) -> bool:
            return name in iter(self)

    count = 400
    members = Members(f"m{number}" for number in range(count))
    base = Base(4, members, members, members[0])
    play = Play(base=base, first_round=5, claimed=False, agent=agent, max_nodes=count)
    # One of those that come last has the first rank.
    for name in reversed([*members]):
        play.on(membership.Connected(name, running=None))
        play.join(name)
    assert play.term.membership.claiming
    assert Members.walks < 20


def running() -> Play:
    """A leader of a round of n1 and n2."""
    play = Play(expected_nodes=("n1", "n2"), min_nodes=2)
    play.write(play.join("n1", "n2")[-1])
    assert play.term.membership.phase is membership.Phase.RUNNING
    return play


def test_a_member_whose_process_has_ended_is_not_waited_for() -> None:
    play = running()
    assert play.on(membership.Disconnected("n2")) == [ProbeDisconnected("n2")]
    told = of(CarryOut, play.on(DisconnectedEnded("n2")))
    assert [type(action.decision) for action in told] == [membership.Drop, Interrupt]
    assert isinstance(told[1].decision, Interrupt)
    message = told[1].decision.message
    assert (message.reason, message.node, message.detail) == (
        membership.Reason.NODE_LOST,
        "n2",
        "its process has ended",
    )
    assert play.term.membership.gone == {"n2"}


def test_a_member_that_leaves_and_whose_process_has_ended_has_left() -> None:
    play = running()
    play.on(Leaving("n2", LeaveReason.PREEMPTED))
    play.on(membership.Disconnected("n2"))
    told = of(CarryOut, play.on(DisconnectedEnded("n2")))
    assert isinstance(told[0].decision, membership.Retire)
    assert play.term.membership.lingering == set()


def test_a_member_that_is_back_has_not_ended_whoever_refuses_connections_in_its_place() -> None:
    play = running()
    play.on(membership.Disconnected("n2"))
    play.on(membership.Connected("n2", running=0))
    assert play.on(DisconnectedEnded("n2")) == []


def test_an_agent_that_ends_before_the_first_round_is_not_waited_for() -> None:
    play = Play(expected_nodes=("n1", "n2"), min_nodes=2)
    play.join("n2")
    play.on(membership.Disconnected("n2"))
    assert decisions(play.on(DisconnectedEnded("n2"))) == [membership.Drop]


def test_a_stranger_whose_connection_breaks_is_not_asked_about() -> None:
    assert running().on(membership.Disconnected("n7")) == []


def test_an_agent_that_has_come_meanwhile_is_not_gone_whatever_slurm_says() -> None:
    play = candidacy()
    play.wait(ASK_SLURM_FIRST)
    play.join("n2")
    play.on(AgentsGone(frozenset({"n0", "n2"})))
    assert play.term.membership.gone == {"n0"}


def test_nodes_of_the_allocation_that_are_missing_are_asked_about() -> None:
    play = Play(expected_nodes=("n1", "n2"), last_call_timeout=30.0)
    play.join("n1")
    (asked,) = of(AskSlurmAboutNodes, play.wait(1.1))
    assert asked == AskSlurmAboutNodes(("n2",))
    assert of(CheckTerm, play.on(NodesDown(frozenset({"n2"})))) == [CheckTerm()]


@pytest.mark.parametrize("answer", [NodesDown(frozenset()), AgentsEnded(frozenset()), AgentsGone(frozenset())])
def test_what_is_answered_once_the_round_runs_is_asked_no_more(answer: TermEvent) -> None:
    play = Play(base=LAST, first_round=5, expected_nodes=("n0", "n1", "n2"), last_call_timeout=30.0)
    play.join("n1")
    play.wait(ASK_SLURM_FIRST + 1.1)
    assert play.term.asking >= {ProbeMembers, AskSlurmAboutAgents, AskSlurmAboutNodes}
    play.write(play.join("n0", "n2")[-1])
    assert play.term.membership.phase is membership.Phase.RUNNING
    play.on(answer)
    assert [action for action in play.wait(60.0) if not isinstance(action, CheckTerm)] == []


def test_a_leader_that_forms_a_round_looks_whether_its_term_is_the_newest() -> None:
    play = Play(min_nodes=2)
    play.join("n1")
    for _ in range(2):
        (check,) = of(CheckTerm, play.wait(CHECK_TERM + 0.01))
        assert check == CheckTerm(watching=True)
        assert play.answer(check) == []
    (check,) = of(CheckTerm, play.wait(CHECK_TERM + 0.01))
    assert play.answer(check, allowed=False) == [StepDown("another agent leads with a newer epoch")]


def test_an_undisturbed_leader_asks_nobody() -> None:
    play, check = forming()
    play.write(check)
    assert play.wait(60.0) == []


def test_a_candidate_that_keeps_members_from_each_other_says_so_and_when_it_does_no_more() -> None:
    play = candidacy(agent="n9")
    assert of(ReportBlocking, play.join("n1")) == [ReportBlocking(blocks=True)]
    assert of(ReportBlocking, play.join("n2")) == [ReportBlocking(blocks=False)]
