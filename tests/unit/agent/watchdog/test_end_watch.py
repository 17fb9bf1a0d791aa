from __future__ import annotations

import os
import time

import pytest

from slurm_elastic.agent.watchdog import watchdog
from slurm_elastic.agent.watchdog.stacks import Watched
from slurm_elastic.agent.watchdog.stalls import HangTimeout
from slurm_elastic.agent.watchdog.watchdog import Watchdog
from tests.unit.agent.watchdog.conftest import Make


def test_each_thing_is_told_once_in_a_round(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slurm_elastic")
    living: set[int] = set()
    state = watchdog.process_state(os.getpid())
    monkeypatch.setattr(watchdog, "process_state", lambda pid: state if pid in living else None)
    monkeypatch.setattr(Watchdog, "_write_stacks", lambda *_: None)
    watched = make(None)

    def told(alive: int, now: float) -> int:
        caplog.clear()
        living.clear()
        living.update(range(alive))
        watched._look_at_ends(now)
        return len(caplog.messages)

    for start in (0.0, 1000.0):
        watched.watch([Watched(pid, pid, pid, 0, None) for pid in range(4)])
        assert [told(4, start), told(3, start + 500), told(2, start + 509), told(2, start + 510)] == [0, 0, 0, 1]
        assert caplog.messages == ["ranks 2, 3 ended 10 s ago, and ranks 0, 1 still runs"]
        assert "stacks" not in watched._round.said
        assert told(1, start + 560) == 0
        assert "stacks" in watched._round.said
        assert [told(0, start + 561), told(0, start + 900)] == [1, 0]


def test_a_timeout_that_watches_nothing_is_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    now = time.monotonic()
    for timeout, told in ((HangTimeout(), 1), (None, 0)):
        caplog.clear()
        watched = make(timeout)
        watched.watch([Watched(os.getpid(), 0, 0, 0, None)])
        watched._look_at_ends(now + 5)
        assert not caplog.messages
        watched._look_at_ends(now + 65)
        assert len(caplog.messages) == told
