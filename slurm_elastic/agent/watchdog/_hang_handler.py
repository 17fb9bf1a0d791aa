"""Handle workers that hang: record their stacks, kill them, and report both."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping

from slurm_elastic.agent.watchdog._hang import Hang, kill, write_stacks
from slurm_elastic.agent.watchdog._proc import Watched, process_state
from slurm_elastic.agent.watchdog._stacks import collect_stacks, dump_python_stacks
from slurm_elastic.agent.watchdog._timers import Timer

__all__ = ["HangHandler"]

logger = logging.getLogger("slurm_elastic")

_STACKS_TIMEOUT = 5.0
_DUMP_TIMEOUT = 1.0
"""Seconds that Python's faulthandler gets to write its stacks."""
_SIGNAL_TIMEOUT = 2.0
"""Seconds that a worker gets to end of the client's own signal, before SIGKILL."""


class HangHandler:
    """The workers of the present round that hang, by process id.

    Each batch of them has a thread of its own, so that the watchdog reads on. Methods are called with the lock held.

    Args:
        lock: without it no worker is signalled.
        report: told every hang, on the thread of its batch.
        say: told what torch's own watchdog would record: the name of the event and the timer; on the same thread.

    Attributes:
        threads: that handle hangs at this moment.
    """

    def __init__(self, lock: threading.Lock, report: Callable[[Hang], None], say: Callable[[str, Timer], None]) -> None:
        self._lock, self._report, self._say = lock, report, say
        self._round = 0
        self._hung: set[int] = set()
        self._killed: dict[int, Hang] = {}
        self.threads: tuple[threading.Thread, ...] = ()

    def __contains__(self, pid: int) -> bool:
        return pid in self._hung

    def hang_of(self, pid: int) -> Hang | None:
        """Return the hang for which a worker was killed, None if it was not."""
        return self._killed.get(pid)

    def end_round(self) -> None:
        """Kill no worker of the round any more."""
        self._round += 1
        self._hung.clear()
        self._killed.clear()

    def handle(self, found: Mapping[int, list[Timer]], workers: Mapping[int, Watched]) -> None:
        """Handle workers that were not known to hang, in a thread.

        Args:
            found: their expired timers, first ones first.
            workers: all of the round.
        """
        self._hung.update(found)
        thread = threading.Thread(
            target=self._handle, args=(found, workers, self._round), name="slurm-elastic-hang", daemon=True
        )
        self.threads = (*(thread for thread in self.threads if thread.is_alive()), thread)
        thread.start()

    # On the thread of a batch, without the lock.

    def _handle(self, found: Mapping[int, list[Timer]], workers: Mapping[int, Watched], round_: int) -> None:
        for timers in found.values():
            for timer in timers:
                why = "it takes no step" if timer.steps is not None else f"timer {timer.request.scope!r} expired"
                logger.warning("rank %s does not go on: %s", workers[timer.worker].rank, why)
        pids = {timer.request.pid for timers in found.values() for timer in timers} | set(found)
        stacks = collect_stacks(sorted(pids), _STACKS_TIMEOUT, lambda: self._round != round_)
        handled = [self._end(workers[pid], timers, stacks, round_) for pid, timers in found.items()]
        for pid, killed in handled:
            if killed is not None:
                self._make_sure(pid, killed, round_)
            else:
                with self._lock:
                    if self._round == round_:
                        # It lives; its later timers count again.
                        self._hung.discard(pid)

    def _end(
        self, worker: Watched, timers: list[Timer], stacks: dict[int, str], round_: int
    ) -> tuple[int, signal.Signals | None]:
        """Send the first signal to a worker, and report."""
        # As torch's server: the first timer that names a signal decides.
        timer = next((timer for timer in timers if timer.request.signal > 0), timers[0])
        killed = signal.Signals(timer.request.signal) if timer.request.signal > 0 else None
        path = write_stacks(worker, "\n".join(stacks[pid] for pid in dict.fromkeys((timer.request.pid, worker.pid))))
        with self._lock:
            process = process_state(worker.pid)
            if self._round != round_ or process is None or process.state == "Z":
                return worker.pid, None
            seconds = max(0.0, timer.expires - timer.acquired)  # It may have been read too late.
            request = timer.request
            hang = Hang(worker, request.scope, request.pid, seconds, process.state, killed, path, timer.steps)
            if killed is not None:
                self._killed[worker.pid] = hang
                if not dump_python_stacks(worker.pid):
                    kill(worker.pid, killed)
        self._report(hang)
        for expired in timers:
            self._say("timer expired", expired)
        if killed is not None:
            self._say("kill worker process", timer)
        return worker.pid, killed

    def _make_sure(self, pid: int, killed: signal.Signals, round_: int) -> None:
        for seconds, number in ((_DUMP_TIMEOUT, killed), (_SIGNAL_TIMEOUT, signal.SIGKILL)):
            by = time.monotonic() + seconds
            while time.monotonic() < by:
                process = process_state(pid)
                if self._round != round_ or process is None or process.state == "Z":
                    return
                time.sleep(0.02)
            with self._lock:
                if self._round == round_:
                    kill(pid, number)
