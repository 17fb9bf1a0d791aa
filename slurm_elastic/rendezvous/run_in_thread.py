"""Calls that may take long, made where they hold up nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def run_in_thread(call: Callable[[], _T]) -> _T:
    """Make a call in a thread of its own, and return or raise what it does.

    asyncio.to_thread has few threads, and Python waits at its end for each of them (concurrent/futures/thread.py,
    3.11). A question to a controller that cannot be reached would take one of them for seconds, and again and again
    while the network is cut: nothing would be left for the records, and an agent that has to go would stay.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: _T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        # Its result is of no use any more if the loop is closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="slurm-elastic-call", daemon=True).start()
    return await done
