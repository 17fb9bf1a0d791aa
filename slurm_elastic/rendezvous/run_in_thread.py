"""Calls that may take long, made where they hold up nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


async def run_in_thread(call: Callable[[], _T]) -> _T:
    """Make a call in a thread of its own, and return or raise what it does.

    asyncio.to_thread has few threads, and Python waits at its end for each of them (concurrent/futures/thread.py,
    3.11). A question to a controller that cannot be reached would take one of them for seconds, and again and again
    while the network is cut: nothing would be left for the records, and an agent that has to go would stay.
    """
    done: Future[_T] = Future()
    # It cannot be cancelled any more, whatever becomes of the one that waits.
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="slurm-elastic-call", daemon=True).start()
    return await asyncio.wrap_future(done)
