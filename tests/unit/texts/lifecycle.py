"""The life cycle of an agent, told by text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slurm_elastic.agent.lifecycle import actions, events, machine, states
from slurm_elastic.agent.lifecycle.states import Departure, Done, Rejoin, State
from slurm_elastic.rendezvous.election.events import CutOff, LeaderLost, RecordsLost, Unreachable
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import LeaveReason, Reason, WorkerFailure
from slurm_elastic.rendezvous.membership.assignment import Place
from slurm_elastic.rendezvous.membership.events import Outcome
from slurm_elastic.rendezvous.transport.messages import Assignment, LeaveRequest, LeaveRequested
from tests.unit.texts import cases
from tests.unit.texts.cases import number, words

NOW = 100.0
FAILURE = WorkerFailure("n1/7.0/1", "n1", 1, 3, "boom")
DEPARTURE = Departure(LeaveReason.PREEMPTED, "SIGTERM", stop_by=NOW + 25, gone_by=NOW + 30)
WITHIN = r"(?:, within (?P<seconds>\S+) s)?"


def assignment(rank: int = 1, nodes: int = 2) -> Assignment:
    place = Place("n1/7.0/1", "n1", rank, 1, rank, "default", rank, nodes)
    return Assignment(1, place, 4, Reason.START, nodes, nodes, "n0", 1, 0)


def begins(given: str) -> State:
    """Return the state of an agent: what it does, in which place of its round, and what its workers know."""
    what, _, more = given.partition(", ")
    known = words(more, "rank", "step", "signalled", "far", "agreed", "sending")
    rank, _, nodes = known.get("rank", "1 of 2").partition(" of ")
    round_ = assignment(int(rank), int(nodes))
    training = states.Training(round_, number(known.get("step")), "signalled" in known)
    far = Departure(LeaveReason.PREEMPTED, "SIGTERM", stop_by=NOW + 295, gone_by=NOW + 299)
    return {
        "joins": states.Joining("agreed" in known),
        "starts its workers": states.Starting(round_),
        "trains": training,
        "leaves": replace(training, departure=far if "far" in known else DEPARTURE),
        "has workers that succeeded": states.Reported(round_, succeeded=True),
        "has workers that failed": states.Reported(round_, succeeded=False),
        "has started no workers": states.Reported(round_, None),
        "stops its workers": states.Stopping(round_, Rejoin(), NOW + 1),
        "stops its workers to leave": states.Stopping(round_, DEPARTURE, NOW + 1),
        "lingers": states.Lingering(DEPARTURE),
    }[what]


EVENTS: dict[str, Callable[..., events.Event]] = {
    "it begins(?P<flag> after a signal)?": lambda flag: events.Started(bool(flag)),
    r"it has a place(?:, rank (?P<rank>\d+) of (?P<nodes>\d+))?": lambda rank, nodes: assignment(
        int(rank or 1), int(nodes or 2)
    ),
    "its workers run": events.WorkersStarted,
    "no worker was started": events.StartInterrupted,
    "the program cannot be run": lambda: events.StartFailed(FAILURE),
    f"it gets (?P<name>SIGTERM|SIGINT){WITHIN}(?P<asked>, and Slurm is asked)?: (?P<why>.*)": (
        lambda name, seconds, asked, why: events.Signalled(
            LeaveReason(why), name, number(seconds), bool(asked), name == "SIGINT"
        )
    ),
    f"Slurm names the cause{WITHIN}(?P<job>, for the job)?: (?P<why>.*)": lambda seconds, job, why: events.Diagnosed(
        LeaveReason(why), number(seconds), f"as Slurm says, {why}", bool(job)
    ),
    f"the leader asks it to leave{WITHIN}: (?P<why>.*)": lambda seconds, why: LeaveRequested(
        LeaveReason(why), number(seconds), f"asked, {why}"
    ),
    "the leader says that the round is over: (?P<why>.*)": lambda why: messages.Interrupted(
        4, Reason(why), "n0", "why"
    ),
    "it does not hear the leader": lambda: CutOff(4, Reason.NODE_LOST, "n1", "silent"),
    "the leader has no place for it": messages.Waiting,
    "the leader asks where its workers can stop": lambda: messages.Holding(4),
    rf"the leader says: stop after step (?P<step>\d+){WITHIN}: (?P<why>\w+)(?: \((?P<detail>.*)\))?": (
        lambda step, seconds, why, detail: messages.Stopping(
            4, int(step), Reason(why), "n2", detail or "", number(seconds)
        )
    ),
    r"its workers take step (?P<step>\d+)": lambda step: events.StepAccepted(int(step)),
    "its workers succeed(?P<flag> at the step)?": lambda flag: events.WorkersSucceeded(bool(flag)),
    "a worker fails": events.WorkersFailed,
    "no worker runs any more": events.WorkersEnded,
    "the round is closed(?P<leads>, and it leads)?(?:, but for (?P<survivors>.*))?": (
        lambda leads, survivors: events.RoundClosed(bool(leads), survivors or "")
    ),
    "its deadline is reached": events.DeadlineReached,
    "the leader is lost: (?P<why>.*)": LeaderLost,
    "there is no leader(?P<usage>, by a mistake of the user)?: (?P<why>.*)": lambda usage, why: Unreachable(
        why, usage=bool(usage)
    ),
    "the records are lost: (?P<why>.*)": RecordsLost,
    r"the run has (?P<how>.*?)(?P<flag> \(failure: boom\))?": lambda how, flag: messages.Ended(
        Outcome(how), FAILURE if flag else None, "detail"
    ),
}


def after(moment: float | None) -> str:
    return "" if moment is None else f"{round(moment - NOW, 3):g}"


def ending(outcome: Done) -> str:
    more = [outcome.detail, "gave up" * outcome.gave_up, "no leader" * outcome.no_leader]
    more += [f"failure: {outcome.failure.message}"] if outcome.failure is not None else []
    return ", ".join([f"exit code {outcome.exit_code.name.lower()}", *filter(None, more)])


def leave(departure: Departure) -> str:
    return f"{departure.reason.value} ({departure.detail})"


def shown(state: State) -> str:
    """What an agent does, and until when."""
    match state:
        case states.Joining(agreed, spare):
            return "joins" + ", after the stop step" * agreed + ", as a spare" * spare
        case states.Starting():
            return "starts workers"
        case states.Training(_, step, signalled, departure, untold):
            trains = "trains" + f" to step {step}" * (step is not None) + ", with signalled workers" * signalled
            if departure is None:
                return trains
            ends = f"SIGTERM at {after(departure.stop_by)}, SIGKILL at {after(departure.gone_by)}"
            return f"leaves, {leave(departure)}, {trains}, {ends}" + ", not announced" * (untold is not None)
        case states.Reported(_, succeeded, signalled):
            ended = "did not start" if succeeded is None else "succeeded" if succeeded else "failed"
            return f"waits for the leader, workers {ended}" + ", signalled" * signalled
        case states.Stopping(_, then, stop_by, terminate_at):
            match then:
                case Rejoin():
                    next_ = "join again"
                case Departure():
                    next_ = f"leave, {leave(then)}"
                case Done():
                    next_ = f"end, {ending(then)}"
            term = f", SIGTERM at {after(terminate_at)}" if terminate_at is not None else ""
            return f"stops its workers to {next_}{term}, SIGKILL at {after(stop_by)}"
        case states.Lingering():
            return "lingers"
        case states.Done():
            return "has ended"


HELD = "let the workers wait before their next step, and tell the leader which"
SHOWN: dict[type, Callable[[Any], str]] = {
    actions.Join: lambda join: "end the worker store\n" * join.ends_store + "join",
    actions.StartWorkers: lambda _: "start the workers",
    actions.SignalWorkers: lambda _: "send the workers their signal",
    actions.Hold: lambda _: HELD,
    messages.Held: lambda _: "tell the leader: can stop nowhere",
    actions.StopAtStep: lambda stop: (
        f"tell the workers to stop after step {stop.step}"
        f"{f', within {stop.seconds:g} s' if stop.seconds is not None else ''}: {stop.reason}"
    ),
    actions.Fence: lambda _: "forbid checkpoints",
    actions.ExpectExits: lambda exits: f"expect that workers end{', unplanned' * exits.unplanned}",
    actions.TerminateWorkers: lambda stop: f"send the workers {'SIGINT' if stop.interrupt else 'SIGTERM'}",
    actions.CloseRound: lambda _: "close the round, and kill what is left",
    actions.AnnounceLeave: lambda told: f"tell the leader: leaves in {told.seconds:g} s, {leave(told)}",
    actions.Tell: lambda tell: SHOWN[type(tell.message)](tell.message),
    messages.Left: lambda left: (
        f"tell the leader: has left{', stopped at the step' * left.stopped}, {left.reason.value}"
    ),
    messages.Finished: lambda _: "tell the leader: the workers have finished",
    actions.ReportFailure: lambda _: "tell the leader: a worker failed, which was the first",
    messages.WorkerFailed: lambda failed: f"tell the leader: a worker failed, {failed.failure.message}",
    LeaveRequest: lambda asked: f"tell the agents of this job to leave in {asked.seconds:g} s, {leave(asked)}",
    actions.Log: lambda log: f"log: {log.text}",
}
"""What an action looks like."""


class Agent:
    """An agent on n1 in run 7, which shuts workers down within 30 s and has a margin of 5 s.

    Args:
        given: what it does, see `begins`.
    """

    def __init__(self, given: str) -> None:
        given = given.removeprefix("an agent that ")
        names = ("n1/7.0/1", "n1", "7", "n0")
        self._config = states.LifecycleConfig(*names, 30.0, 5.0, signals_workers="sending signals" in given)
        self._state = begins(given)

    def handle(self, event: str) -> list[str]:
        """Return a line for each action on an event, and one for what the agent does now if that has changed."""
        if event == "show what is watched":
            moment = states.deadline(self._state)
            return [f"deadline {after(moment)}" if moment is not None else "no deadline"]
        _, moment_, what = event.split(" ", 2)
        before, lines = self._state, []
        for found in cases.events(what, EVENTS):
            self._state, decided = machine.step(self._config, self._state, found, NOW + float(moment_))
            lines += [line for action in decided for line in SHOWN[type(action)](action).split("\n")]
            if isinstance(self._state, states.Done) and not isinstance(before, states.Done):
                lines.append(f"end: {ending(self._state)}")
        return lines + ([f"=> it {shown(self._state)}"] if self._state != before else [])
