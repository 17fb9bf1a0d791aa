"""What the agent n0 says to its leaders, and what it ignores, told by text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slurm_elastic.rendezvous.election.follower import Follower
from slurm_elastic.rendezvous.membership import events as messages
from slurm_elastic.rendezvous.membership.agents import LeaveReason, WorkerFailure
from tests.unit.rendezvous.helpers.scenario import candidate
from tests.unit.texts.cases import events, number

FAILURE = WorkerFailure("n0", "n0", rank=0, exit_code=1)


def shown(message: messages.MemberMessage) -> str:
    """What is said in a message."""
    match message:
        case messages.Connected(_, running, coming, over):
            more = "" if running is None else f", runs round {running}{', which is over' * over}"
            return f"say: connected{', will join' * coming}{more}"
        case messages.Joined(_, attempt, last, restarts, cut_off):
            after = f" after round {last}" if last is not None else ""
            more = f"{f', restarts {restarts}' * bool(restarts)}{', cut off' * cut_off}"
            return f"say: joins, attempt {attempt}{after}{more}"
        case messages.Leaving(_, reason, seconds):
            return f"say: leaves{f' in {seconds:g} s' if seconds is not None else ''}, {reason.value}"
        case messages.Left(_, reason, stopped):
            return f"say: has left{', stopped at the step' * stopped}, {reason.value}"
        case messages.WorkerFailed(_, round_):
            return f"say: a worker failed in round {round_}"
        case _:
            return (
                f"say: {type(message).__name__.lower()}{f' round {message.round}' if hasattr(message, 'round') else ''}"
            )


class Agent:
    """The agent n0 between its workers and its leaders."""

    def __init__(self, given: str) -> None:
        self._follower, self._now = Follower("n0", coming="gets ready" in given), 0.0
        self._events: dict[str, Callable[..., list[str]]] = {
            "it joins": self._joins,
            "it connects": self._greets,
            r"the leader gives it a place in round (?P<round_>\d+), for attempt (?P<attempt>\d+)": (
                lambda round_, attempt: self._takes(self._follower.placed(int(attempt), int(round_)))
            ),
            r"it leaves(?:, in (?P<seconds>\S+) s)?: (?P<why>.*)": lambda seconds, why: self._says(
                messages.Leaving("n0", LeaveReason(why), number(seconds))
            ),
            "it has left(?P<stopped>, stopped at the step)?: (?P<why>.*)": lambda stopped, why: self._says(
                messages.Left("n0", LeaveReason(why), bool(stopped))
            ),
            "its workers have stopped": lambda: self._takes(replace(self._follower, running=False)),
            "its workers finish": lambda: self._says(messages.Finished("n0", self._placed_in)),
            "a worker fails": lambda: self._says(messages.WorkerFailed("n0", self._placed_in, FAILURE)),
            "it closes the run": lambda: self._says(messages.Closed("n0")),
            r"the leader says that (?P<restarts>\d+) restarts are charged": lambda restarts: self._takes(
                self._follower.charged(int(restarts))
            ),
            "the leader is silent": lambda: self._takes(self._follower.cut_off_now(), "stop the workers"),
            r"the leader says that round (?P<round_>\d+) is over": lambda round_: (
                ["heeded"] if self._follower.interrupted(int(round_)) else ["ignored"]
            ),
            "it knows that the round is over": lambda: self._takes(self._follower.note_over()),
            r"the leader asks where round (?P<round_>\d+) can stop": lambda round_: (
                ["ask the workers"] if self._follower.holding(int(round_)) else ["ignored"]
            ),
            r"the leader says that round (?P<round_>\d+) stops after step (?P<step>\d+)": lambda round_, step: (
                self._takes(self._follower.stopping(int(round_), int(step)), f"stop the workers after step {step}")
            ),
        }

    @property
    def _placed_in(self) -> int:
        assert self._follower.last_round is not None
        return self._follower.last_round

    def _joins(self) -> list[str]:
        self._follower, said = self._follower.join(candidate("n0"))
        return [shown(said)]

    def _says(self, said: messages.MemberMessage) -> list[str]:
        self._follower = self._follower.told(said, self._now)
        return [shown(said)]

    def _greets(self) -> list[str]:
        self._follower, greeting = self._follower.greet(self._now)
        return [shown(message) for message in greeting]

    def _takes(self, follower: Follower | None, done: str = "") -> list[str]:
        if follower is None:
            return ["ignored"]
        self._follower = follower
        return [done] if done else []

    def handle(self, event: str) -> list[str]:
        """Return what it says or does on an event, which may be nothing."""
        _, moment, what = event.split(" ", 2)
        self._now = float(moment)
        return next(events(what, self._events))
