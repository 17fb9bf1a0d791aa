from __future__ import annotations

from slurm_elastic.agent.watchdog.timers import Request, Timer, Timers


def timer(pid: int, scope: str, expires: float) -> Timer:
    return Timer(Request(pid, scope, expires, 9), worker=pid, started=0, acquired=0.0, expires=expires)


def test_timers_expire_once_and_in_their_order() -> None:
    timers = Timers()
    late, soon, other = timer(7, "a", 3.0), timer(7, "b", 2.0), timer(8, "a", 9.0)
    assert timers.next_expiry() is None
    for each in (late, soon, other):
        assert timers.acquire(each)
    assert timers.next_expiry() == 2.0
    assert timers.take_expired(1.9) == []
    assert timers.take_expired(3.0) == [soon, late]
    assert timers.take_expired(3.0) == []
    assert timers.next_expiry() == 9.0


def test_a_timer_acquired_again_starts_anew_and_a_released_one_never_expires() -> None:
    timers = Timers()
    timers.acquire(timer(7, "a", 1.0))
    timers.acquire(timer(7, "a", 5.0))
    timers.acquire(timer(8, "a", 1.0))
    timers.release(timer(8, "a", -1).request)
    timers.release(timer(9, "unknown", -1).request)
    assert timers.take_expired(4.0) == []
    assert timers.take_expired(9.0) == [timer(7, "a", 5.0)]


def test_timers_that_are_put_off_expire_later_and_new_ones_do_not() -> None:
    timers = Timers()
    timers.acquire(timer(7, "a", 5.0))
    timers.postpone(3600.0)
    timers.acquire(timer(7, "b", 3605.5))
    assert timers.next_expiry() == 3605.0
    assert timers.take_expired(3604.9) == []
    assert [each.request.scope for each in timers.take_expired(3606.0)] == ["a", "b"]


def test_a_request_is_put_off_and_a_release_stays_one() -> None:
    assert timer(7, "a", 5.0).request.later(2.0) == timer(7, "a", 7.0).request
    assert timer(7, "a", -1).request.later(2.0) == timer(7, "a", -1).request


def test_there_is_an_end_to_how_many_there_can_be() -> None:
    timers = Timers()
    assert all(timers.acquire(timer(7, str(number), 1.0)) for number in range(10_000))
    assert not timers.acquire(timer(7, "one more", 1.0))
    assert timers.acquire(timer(7, "0", 2.0))
