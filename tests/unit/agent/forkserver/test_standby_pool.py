"""Each process of the standby pool takes one order; the pool says when none is left."""

from __future__ import annotations

import os

from slurm_elastic.agent.forkserver._channel import Channel
from slurm_elastic.agent.forkserver._standby_pool import StandbyPool


def test_order_goes_to_the_first_that_still_waits() -> None:
    pool = StandbyPool(5)
    (first, closed), (second, waits) = Channel.pair(), Channel.pair()
    pool.add(101, first)
    pool.add(102, second)
    closed.close()
    reading, writing = os.pipe()
    assert pool.take({"rank": 3}, [writing]) == 102
    os.close(writing)
    received = waits.receive()
    assert received is not None
    order, (passed,) = received
    assert not os.get_inheritable(passed)
    assert order == {"rank": 3}
    os.write(passed, b"here")
    os.close(passed)
    assert os.read(reading, 10) == b"here"
    os.close(reading)
    assert waits.receive() is None
    waits.close()
    assert pool.take({"rank": 4}, []) is None
    assert pool.wanted == 0


def test_processes_without_an_order_end_when_the_pool_is_closed() -> None:
    pool = StandbyPool(2)
    near_end, far_end = Channel.pair()
    pool.add(101, near_end)
    pool.close()
    assert far_end.receive() is None
    far_end.close()
    assert pool.wanted == 0
