"""An event loop whose time passes only while everybody waits: waits of seconds take no time, and are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
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


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """As asyncio.run, from time 0 on."""
    loop = _Loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
