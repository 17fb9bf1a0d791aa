"""The life cycle of an agent in drawn schedules: whatever comes in whatever order, promises about one node hold."""

from __future__ import annotations

import random
from collections import deque

import pytest

from slurm_elastic.agent.lifecycle import actions, events
from slurm_elastic.agent.lifecycle.actions import Action
from slurm_elastic.agent.lifecycle.events import Event
from slurm_elastic.agent.lifecycle.machine import step
from slurm_elastic.agent.lifecycle.states import (
    Done,
    Joining,
    LifecycleConfig,
    State,
    Stopping,
    Training,
    deadline,
)
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.election.events import CutOff, LeaderLost, RecordsLost, Unreachable
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.events import Outcome
from slurm_elastic.rendezvous.transport.messages import Assignment, LeaveRequested
from tests.unit.agent.helpers.rounds import placed

FAILURE = WorkerFailure("n1/7.0/1", "n1", 1, 3, "boom")
SCHEDULES = 1000


class Node:
    """One node: the machine, a model of its workers, and a clock.

    Args:
        seed: of what happens.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        signals = self.chance.random() < 0.5
        self.config = LifecycleConfig("n1/7.0/1", "n1", "7", "n0", 30.0, leave_margin=5.0, signals_workers=signals)
        self.now = 0.0
        self.state: State = Joining()
        self.round = 0
        self.workers_run = self.obey_sigterm = False
        self.leave_by: float | None = None
        self.announced = self.said_left = 0
        self.happened(events.Started(signalled=self.chance.random() < 0.1))

    def happened(self, event: Event) -> None:
        """Step the machine, and do what it says."""
        waiting = deque([event])
        while waiting:
            over = isinstance(self.state, Done)
            self.state, found = step(self.config, self.state, waiting.popleft(), self.now)
            assert not (over and found), f"{found} after the end"
            waiting.extend(result for action in found if (result := self._do(action)) is not None)
            if isinstance(self.state, Done):
                assert not self.workers_run, "workers outlive their agent"
                assert self.state.exit_code is not ExitCode.FENCED

    def _do(self, action: Action) -> Event | None:
        match action:
            case actions.Join() | actions.StartWorkers():
                assert not self.workers_run, "another round beside workers"
                assert not self.announced, "a leaving agent joins"
                if isinstance(action, actions.StartWorkers):
                    return self._start()
            case actions.TerminateWorkers():
                if self.obey_sigterm:
                    self.workers_run = False
            case actions.CloseRound():
                self.workers_run = False
                survivors = "process 5" if self.chance.random() < 0.02 else ""
                return events.RoundClosed(leads=self.chance.random() < 0.5, survivors=survivors)
            case actions.StopAtStep(step=at):
                return self.chance.choice((events.StepAccepted(at), None))
            case actions.AnnounceLeave(seconds=seconds):
                self.announced += 1
                by = self.now + max(seconds, 2.0)
                # More time may become known, but not for workers that are being stopped.
                self.leave_by = by if self.leave_by is None else max(self.leave_by, by)
            case actions.Tell(messages.Left()):
                assert not self.workers_run, "a farewell beside workers"
                self.said_left += 1
        return None

    def _start(self) -> Event:
        self.workers_run = self.chance.random() < 0.9
        self.obey_sigterm = self.chance.random() < 0.5
        if self.workers_run:
            return events.WorkersStarted()
        return self.chance.choice((events.StartInterrupted(), events.StartFailed(FAILURE)))

    def draw(self) -> Event:
        """Something that may come at any moment."""
        chance = self.chance
        reason = chance.choice([*Reason])
        leave = chance.choice((LeaveReason.PREEMPTED, LeaveReason.DRAINED, LeaveReason.TIME_LIMIT))
        seconds = chance.choice((None, -1.0, 1.0, 40.0))
        ended = (events.WorkersSucceeded(agreed=chance.random() < 0.5), events.WorkersFailed())
        return chance.choice(
            (
                self._placed(),
                self._placed(),
                messages.Interrupted(self.round, reason, "n0", ""),
                CutOff(self.round, Reason.NODE_LOST, "n1", ""),
                messages.Holding(self.round),
                messages.Stopping(self.round, 5, reason, "n0", "", None),
                messages.Waiting(),
                LeaveRequested(leave, seconds, "asked"),
                events.Signalled(leave, "SIGTERM"),
                events.Diagnosed(leave, seconds, "diagnosed", for_job=chance.random() < 0.5),
                *(ended if self._may_end() else ()),
                *((self._rare(),) if chance.random() < 0.1 else ()),
            )
        )

    def _placed(self) -> Assignment:
        if isinstance(self.state, Joining):
            self.round += 1
        return placed("n1", rank=self.chance.choice((0, 1)), round_=self.round)

    def _rare(self) -> Event:
        return self.chance.choice(
            (
                LeaderLost("gone"),
                Unreachable("no answer"),
                RecordsLost("disk full"),
                *(messages.Ended(outcome, None, "") for outcome in Outcome),
            )
        )

    def _may_end(self) -> bool:
        return isinstance(self.state, Training)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and every deadline on the way be reached."""
        end = self.now + seconds
        while (due := deadline(self.state)) is not None and due <= end:
            self.now = max(self.now, due)
            before = self.state
            self.happened(events.DeadlineReached())
            self.look_at_workers()
            assert self.state != before, "a deadline that would wake the agent again and again"
        self.now = end

    def look_at_workers(self) -> None:
        """Tell the machine when no worker runs any more, if it watches for that."""
        if isinstance(self.state, Stopping) and not self.workers_run:
            self.happened(events.WorkersEnded())


@pytest.mark.parametrize("part", range(3))
def test_what_is_promised_holds_in_every_schedule(part: int) -> None:
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        node = Node(seed)
        for _ in range(30):
            node.happened(node.draw())
            node.look_at_workers()
            node.pass_time(node.chance.choice((0.0, 0.1, 1.0, 20.0)))
            if node.leave_by is not None and node.now > node.leave_by + 0.5:
                assert isinstance(node.state, Done), f"seed {seed}: the agent is there after its deadline: {node.state}"
        assert node.said_left <= 1, f"seed {seed}"
        node.happened(messages.Ended(Outcome.SUCCEEDED, None, ""))
        node.pass_time(60.0)
        node.look_at_workers()
        assert isinstance(node.state, Done), f"seed {seed}: {node.state}"
