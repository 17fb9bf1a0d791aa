from __future__ import annotations

import json
import select

import pytest
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

from slurm_elastic.agent.watchdog.timers import LineReader, Request

WHOLE = FileTimerRequest(100, "step", 5.5, 9).to_json().encode() + b"\n"
ASKED = Request(100, "step", 5.5, 9)


def test_what_torch_writes_is_understood_wherever_a_read_ends() -> None:
    for cut in range(len(WHOLE)):
        reader = LineReader()
        assert reader.feed(WHOLE[:cut]) == []
        assert reader.feed(WHOLE[cut:] + WHOLE) == [ASKED, ASKED]
        assert reader.dropped == 0


def line(**changes: object) -> bytes:
    return json.dumps({**json.loads(WHOLE), **changes}).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0\xff garbage",
        b"[]",
        b"7",
        b"{}",
        b"[" * 3000,
        line(pid="100"),
        line(pid=True),
        line(pid=0),
        line(pid=1),
        line(pid=-100),
        line(pid=2**40),
        line(scope_id=None),
        line(scope_id="x" * 600),
        line(expiration_time="soon"),
        line(expiration_time=float("nan")),
        line(expiration_time=float("inf")),
        line(expiration_time=True),
        line(expiration_time=10**400),
        line(signal=10_000),
        line(signal=9.0),
        line(extra="x" * select.PIPE_BUF),
    ],
)
def test_garbage_is_counted_and_does_no_harm(garbage: bytes) -> None:
    reader = LineReader()
    assert reader.feed(garbage + b"\n" + WHOLE) == [ASKED]
    assert reader.dropped == 1


def test_a_request_after_half_a_line_is_found() -> None:
    reader = LineReader()
    assert reader.feed(WHOLE[:30] + WHOLE) == [ASKED]
    assert reader.dropped == 1


def test_a_megabyte_without_an_end_is_not_kept() -> None:
    reader = LineReader()
    for _ in range(16):
        assert reader.feed(b"x" * 65536) == []
        assert len(reader._rest) <= select.PIPE_BUF
    assert reader.feed(WHOLE) == [ASKED]
    assert reader.dropped > 0
