from __future__ import annotations

from slurm_elastic.agent.watchdog.stalls import EndWatch, Said


def test_each_thing_is_told_once_in_a_round() -> None:
    watch = EndWatch(60.0, watches_steps=False)

    def told(living: int, now: float) -> list[Said]:
        return watch.check(4, living, watched=False, now=now)

    for start in (0.0, 1000.0):
        watch.begin()
        assert told(4, start) == told(3, start + 500) == told(2, start + 509) == []
        assert told(2, start + 510) == [Said.SOME_ENDED]
        assert told(2, start + 559) == []
        assert told(1, start + 560) == [Said.STACKS]
        assert told(0, start + 561) == [Said.ALL_ENDED]
        assert told(0, start + 900) == []


def test_a_timeout_that_watches_nothing_is_told() -> None:
    for watched, steps in ((False, True), (True, True), (False, False)):
        watch = EndWatch(60.0, watches_steps=steps)
        assert watch.check(1, 1, watched=watched, now=5.0) == []
        assert watch.check(1, 1, watched=watched, now=65.0) == ([Said.UNWATCHED] if steps and not watched else [])
