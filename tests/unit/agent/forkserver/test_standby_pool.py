"""Processes that were forked ahead get an order each, as long as somebody waits."""

from __future__ import annotations

import os

from slurm_elastic.agent.forkserver._channel import Channel
from slurm_elastic.agent.forkserver._standby_pool import StandbyPool


def test_order_goes_to_the_first_that_still_waits() -> None:
    reserve = StandbyPool(5)
    (first, gone), (second, waits) = Channel.pair(), Channel.pair()
    reserve.add(101, first)
    reserve.add(102, second)
    gone.close()
    reading, writing = os.pipe()
    assert reserve.take({"rank": 3}, [writing]) == 102
    os.close(writing)
    received = waits.receive()
    assert received is not None
    order, (handed,) = received
    assert not os.get_inheritable(handed)
    assert order == {"rank": 3}
    os.write(handed, b"here")
    os.close(handed)
    assert os.read(reading, 10) == b"here"
    os.close(reading)
    assert waits.receive() is None
    waits.close()
    assert reserve.take({"rank": 4}, []) is None
    assert reserve.wanted == 0


def test_those_who_are_not_needed_are_sent_home() -> None:
    reserve = StandbyPool(2)
    near_end, far_end = Channel.pair()
    reserve.add(101, near_end)
    reserve.dismiss()
    assert far_end.receive() is None
    far_end.close()
    assert reserve.wanted == 0
