from __future__ import annotations

import asyncio
import logging

import pytest

from slurm_elastic.rendezvous.leader.agent_connections import DropLog
from slurm_elastic.rendezvous.thread import FaultLog
from slurm_elastic.text import printable


def test_a_flood_of_addresses_is_counted_and_logged_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = DropLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(5000):
            now = 100.0 + number / 100
            log.add(f"10.0.{number >> 8}.{number & 255}", "a frame of 7 bytes")
    assert log.count == 5000
    assert len(caplog.records) == 4


def test_the_next_minute_says_how_much_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = DropLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            log.add(f"10.0.0.{number}", "garbage")
        now = 61.0
        log.add("10.0.1.1", "garbage")
    assert caplog.messages[-1] == "dropped garbage from 10.0.1.1 (logged once; 6 more addresses since the last line)"


def test_foreign_text_moves_no_cursor() -> None:
    assert printable("a\x1b[2Jb\r\n\x9bc\u202ed\ud800") == "a?[2Jb???c?d?"
    assert printable("x" * 1000) == "x" * 300 + "..."


def test_faults_are_logged_with_one_traceback_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log, loop = FaultLog(lambda: now), asyncio.new_event_loop()
    loop.set_exception_handler(log)
    for _ in range(1000):
        loop.call_exception_handler({"message": "Exception in callback\n\x1b[2J", "exception": ValueError("odd")})
    now = 60.0
    loop.call_exception_handler({"message": "again"})
    loop.close()
    assert caplog.messages == ["Exception in callback??[2J", "again (999 more since the last line)"]
    assert caplog.text.count("ValueError: odd") == 1
