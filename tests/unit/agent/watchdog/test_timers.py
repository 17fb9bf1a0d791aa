from __future__ import annotations

import os
import time

import pytest

from slurm_elastic.agent.watchdog.stacks import Watched
from slurm_elastic.agent.watchdog.timers import Request
from slurm_elastic.agent.watchdog.watchdog import Watchdog
from tests.unit.agent.watchdog.conftest import Make

HERE = os.getpid()


def request(scope: str, expires_at: float) -> Request:
    return Request(HERE, scope, expires_at, 9)


@pytest.fixture
def watchdog(make: Make) -> Watchdog:
    """One that watches this process."""
    made = make(None)
    made.watch([Watched(HERE, 0, 0, 0, None)])
    return made


def test_a_timer_acquired_again_starts_anew_and_a_released_one_never_expires(watchdog: Watchdog) -> None:
    now = time.time()
    for asked in (request("a", now + 10), request("b", now), request("a", now + 600), request("b", -1)):
        watchdog._register(asked, 0.0)
    (timer,) = watchdog._timers.values()
    assert timer.request == request("a", now + 600)
    watchdog._register(request("unknown", -1), 0.0)
    assert len(watchdog._timers) == 1
    assert watchdog.dropped == 0


def test_there_is_an_end_to_how_many_there_can_be(watchdog: Watchdog) -> None:
    watchdog._timers = {(HERE, str(number)): None for number in range(10_000)}  # type: ignore[misc]
    watchdog._register(request("one more", time.time() + 600), 0.0)
    assert watchdog.dropped == 1
    watchdog._register(request("0", time.time() + 600), 0.0)
    assert len(watchdog._timers) == 10_000
    assert watchdog.dropped == 1
