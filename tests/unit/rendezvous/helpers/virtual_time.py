"""An event loop whose time passes only while everybody waits: waits of seconds take no time, and are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    passed = 0.0
    stopped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.stopped and timeout:
            self.passed, self.stopped = self.passed + self.stopped, 0.0
            return []
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("everybody waits for ever")
        if not found and timeout is not None:
            self.passed += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.passed


def stop_process(seconds: float) -> None:
    """The process is stopped in its next wait, for so long, which is longer than it meant to wait.

    SIGCONT interrupts epoll_wait(2) (signal(7)), and Python then only waits for what is left of the time
    (Modules/selectmodule.c, 3.11): so what came meanwhile is not seen before that is done which was due by time.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.clock.stopped = seconds


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """As asyncio.run, from time 0 on."""
    loop = _Loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
