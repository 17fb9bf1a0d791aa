"""A worker that dies of what it was forked with, as it seems, costs no restart, once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import cast

import pytest

from slurm_elastic.agent.features import LearnedImportsFeature, RunningRound
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.control.agent_side import WorkerProgress
from slurm_elastic.rendezvous.membership.agents import WorkerFailure
from slurm_elastic.rendezvous.transport.messages import Assignment


class Server:
    def __init__(self, *, learned: bool) -> None:
        self.has_learned = learned
        self.reasons: list[str] = []

    def distrust_learned(self, reason: str) -> None:
        self.reasons.append(reason)
        self.has_learned = False


def feature(server: Server, *, steps: int = 0, ago: float = 0.0) -> tuple[LearnedImportsFeature, RunningRound]:
    made = LearnedImportsFeature(cast(ForkServer, server))
    progress: Callable[[], list[WorkerProgress]] = lambda: [WorkerProgress(0, True, steps, None, None, None, False)]  # noqa: E731
    return made, RunningRound(cast(Assignment, None), {0: 5}, {}, progress, since=time.monotonic() - ago)


def failure(exit_code: int, *, hung: bool = False) -> WorkerFailure:
    return WorkerFailure("n0/1.0/7", "n0", 3, exit_code, "last words", hung=hung)


@pytest.mark.parametrize(
    ("exit_code", "hung", "how"),
    [(-signal.SIGSEGV, False, "died by SIGSEGV"), (-signal.SIGABRT, False, "died by SIGABRT"), (-9, True, "hangs")],
)
def test_the_first_one_is_not_charged(exit_code: int, hung: bool, how: str) -> None:
    server = Server(learned=True)
    made, running = feature(server)
    described = made.attribute(running, failure(exit_code, hung=hung), 5)
    assert described.uncharged
    assert (
        described.summary
        == f"last words; a worker {how} before its first step and starts again without learned imports"
    )
    assert server.reasons == [f"a worker {how} before its first step"]
    assert made.attribute(running, failure(exit_code, hung=hung), 5) == failure(exit_code, hung=hung)


@pytest.mark.parametrize(
    ("exit_code", "learned", "steps", "later"),
    [(1, True, 0, 0), (-9, True, 0, 0), (-11, False, 0, 0), (-11, True, 1, 0), (-11, True, 0, 200)],
)
def test_every_other_one_is(exit_code: int, learned: bool, steps: int, later: float) -> None:
    server = Server(learned=learned)
    made, running = feature(server, steps=steps, ago=later)
    assert not made.attribute(running, failure(exit_code), 5).uncharged
    assert not server.reasons
