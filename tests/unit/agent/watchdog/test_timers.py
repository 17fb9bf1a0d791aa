from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.agent.watchdog.stacks import Watched
from slurm_elastic.agent.watchdog.timers import Request, make_pipe
from slurm_elastic.agent.watchdog.watchdog import Watchdog

HERE = os.getpid()


def request(scope: str, expires_at: float) -> Request:
    return Request(HERE, scope, expires_at, 9)


@pytest.fixture
def watchdog(tmp_path: Path) -> Iterator[Watchdog]:
    """One whose thread does not run, and that watches this process."""
    pipe = make_pipe({"TORCHELASTIC_TIMER_FILE": str(tmp_path / "timer")})
    assert pipe is not None
    made = Watchdog(pipe, lambda _hang: None)
    made.watch([Watched(HERE, 0, 0, 0, None)])
    yield made
    made.stop()


def test_a_timer_acquired_again_starts_anew_and_a_released_one_never_expires(watchdog: Watchdog) -> None:
    now = time.time()
    for asked in (request("a", now + 10), request("b", now), request("a", now + 600), request("b", -1)):
        watchdog._register(asked, 0.0)
    (timer,) = watchdog._timers.values()
    assert timer.request == request("a", now + 600)
    watchdog._register(request("unknown", -1), 0.0)
    assert len(watchdog._timers) == 1
    assert watchdog.dropped == 0


def test_a_request_is_put_off_and_a_release_stays_one() -> None:
    assert request("a", 5.0).later(2.0) == request("a", 7.0)
    assert request("a", -1).later(2.0) == request("a", -1)


def test_there_is_an_end_to_how_many_there_can_be(watchdog: Watchdog) -> None:
    watchdog._timers = {(HERE, str(number)): None for number in range(10_000)}  # type: ignore[misc]
    watchdog._register(request("one more", time.time() + 600), 0.0)
    assert watchdog.dropped == 1
    watchdog._register(request("0", time.time() + 600), 0.0)
    assert len(watchdog._timers) == 10_000
    assert watchdog.dropped == 1
