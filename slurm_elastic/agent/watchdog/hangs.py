"""Handles workers that hang: records their stacks, kills them, and reports both."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slurm_elastic.agent.watchdog.stacks import Watched, collect_stacks, dump_python_stacks, process_state
from slurm_elastic.agent.watchdog.timers import Timer
from slurm_elastic.control import Agreement
from slurm_elastic.ownership import write_own

logger = logging.getLogger("slurm_elastic")


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker whose timer expired, or that takes no step any more.

    Attributes:
        pid: The process that started the timer: the worker, or one that it started.
        seconds: How long the timer ran.
        steps: The number of steps that it has taken in its round, if it takes no further one; None for a timer.
        in_collective: True if its main thread was in a collective; None if that is unknown.
    """

    worker: Watched
    scope: str
    pid: int
    seconds: float
    state: str
    killed: signal.Signals | None
    stacks: str
    steps: int | None = None
    in_collective: bool | None = None

    def __str__(self) -> str:
        text = f"timer {self.scope!r} expired after {self.seconds:.1f} s"
        if self.steps is not None:
            text = f"no step for {self.seconds:.1f} s, after {self.steps} in this round"
        if self.state == "D":
            text += ", in uninterruptible sleep"
        text += f"; killed with {self.killed.name}" if self.killed else "; not killed, as its client asks"
        return text + (f"; stacks in {self.stacks}" if self.stacks else "")


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal; log an error if that fails."""
    try:
        os.kill(pid, number)
    except OSError as error:
        logger.error("process %s cannot be killed: %s", pid, error.strerror)


def write_stacks(worker: Watched, text: str) -> str:
    """Append stacks to the file beside the worker's logs; return its path, empty if it cannot be written."""
    if worker.logs is None:
        logger.warning("stacks of rank %s:\n%s", worker.rank, text)
        return ""
    path = worker.logs / "stacks.txt"
    try:
        with os.fdopen(write_own(path, append=True), "a") as file:
            file.write(text + "\n")
    except OSError as error:
        logger.warning("the stacks of rank %s are not kept: %s: %s", worker.rank, path, error.strerror)
        return ""
    return str(path)


_STACKS_TIMEOUT = 5.0
_DUMPS_TIMEOUT = 1.0
"""Seconds for the workers of all nodes to write their dumps, before one is killed. Each node finds the hang by itself,
at nearly the same time, and the first worker that is killed ends the collective that the others wait in."""
DUMP_TIMEOUT = 1.0
"""Seconds for Python's faulthandler to write its stacks, before the client's signal."""
_SIGNAL_TIMEOUT = 2.0
"""Seconds for a worker to end by the client's signal, before SIGKILL."""


class HangHandler:
    """The workers of the present round that hang, by process id.

    Each batch of them has a thread of its own, so that the watchdog reads on. The caller of a method holds the lock.

    Args:
        lock: The watchdog's lock; a worker is signalled only by the thread that holds it.
        report: Called with every hang, on the thread of its batch.
        record_event: Called with each event of torch's own watchdog and the timer, on the same thread.
    """

    def __init__(
        self,
        lock: threading.Lock,
        report: Callable[[Hang], None],
        record_event: Callable[[str, Timer], None],
        dump_timeout: float,
    ) -> None:
        self._lock, self._report, self._record_event, self._dump_timeout = lock, report, record_event, dump_timeout
        self._round = 0
        self._hung: set[int] = set()
        self._killed: dict[int, Hang] = {}
        self.threads: tuple[threading.Thread, ...] = ()

    def __contains__(self, pid: int) -> bool:
        return pid in self._hung

    def hang_of(self, pid: int) -> Hang | None:
        """Return the hang for which the watchdog has killed a worker of the newest round; None if it has not."""
        return self._killed.get(pid)

    def end_round(self) -> None:
        """Kill no worker of the round from now on."""
        self._round += 1
        self._hung.clear()

    def begin_round(self) -> None:
        """Forget whom the watchdog has killed: the process ids may be those of other workers now."""
        self._killed.clear()

    def handle(self, expired: Mapping[int, list[Timer]], workers: Mapping[int, Watched], agreement: Agreement) -> None:
        """Handle workers that have begun to hang, in a thread.

        Args:
            expired: Their expired timers, in order of expiry, by process id.
        """
        self._hung.update(expired)
        thread = threading.Thread(
            target=self._handle, args=(expired, workers, self._round, agreement), name="slurm-elastic-hang", daemon=True
        )
        self.threads = (*(thread for thread in self.threads if thread.is_alive()), thread)
        thread.start()

    # On the thread of a batch, without the lock.

    def _handle(
        self, expired: Mapping[int, list[Timer]], workers: Mapping[int, Watched], round_: int, agreement: Agreement
    ) -> None:
        for timers in expired.values():
            for timer in timers:
                why = "it takes no step" if timer.steps is not None else f"timer {timer.request.scope!r} expired"
                logger.info("rank %s does not go on: %s", workers[timer.worker].rank, why)
        pids = {timer.request.pid for timers in expired.values() for timer in timers} | set(expired)
        agreement.ask_workers()
        by = time.monotonic() + _DUMPS_TIMEOUT
        stacks = collect_stacks(sorted(pids), _STACKS_TIMEOUT, lambda: self._round != round_)
        # The whole second, where any worker answers: this node's workers may have written theirs, others' not yet.
        has_answers = any(worker.answers for worker in agreement.progress())
        while has_answers and self._round == round_ and time.monotonic() < by:
            time.sleep(0.02)
        waiting = {worker.local_rank: worker.in_collective for worker in agreement.progress()}
        handled = [self._end(workers[pid], timers, stacks, round_, waiting) for pid, timers in expired.items()]
        for pid, killed in handled:
            if killed is not None:
                self._ensure_ended(pid, killed, round_)
            else:
                with self._lock:
                    if self._round == round_:
                        # The worker lives on: its later timers count again.
                        self._hung.discard(pid)

    def _end(
        self,
        worker: Watched,
        timers: list[Timer],
        stacks: dict[int, str],
        round_: int,
        waiting: Mapping[int, bool | None],
    ) -> tuple[int, signal.Signals | None]:
        """Send the first signal to a worker, and report its hang; `waiting` says by local rank who waits."""
        # As in torch's server, the first timer that names a signal decides.
        timer = next((timer for timer in timers if timer.request.signal > 0), timers[0])
        killed = signal.Signals(timer.request.signal) if timer.request.signal > 0 else None
        path = write_stacks(worker, "\n".join(stacks[pid] for pid in dict.fromkeys((timer.request.pid, worker.pid))))
        with self._lock:
            process = process_state(worker.pid)
            if self._round != round_ or process is None or process.state == "Z":
                return worker.pid, None
            seconds = max(0.0, timer.expires - timer.acquired)  # The request may have been read after it expired.
            request = timer.request
            waits = waiting.get(worker.local_rank)
            hang = Hang(worker, request.scope, request.pid, seconds, process.state, killed, path, timer.steps, waits)
            if killed is not None:
                self._killed[worker.pid] = hang
                if not dump_python_stacks(worker.pid):
                    kill(worker.pid, killed)
        self._report(hang)
        for expired in timers:
            self._record_event("timer expired", expired)
        if killed is not None:
            self._record_event("kill worker process", timer)
        return worker.pid, killed

    def _ensure_ended(self, pid: int, killed: signal.Signals, round_: int) -> None:
        for seconds, number in ((self._dump_timeout, killed), (_SIGNAL_TIMEOUT, signal.SIGKILL)):
            by = time.monotonic() + seconds
            while time.monotonic() < by:
                process = process_state(pid)
                if self._round != round_ or process is None or process.state == "Z":
                    return
                time.sleep(0.02)
            with self._lock:
                if self._round == round_:
                    kill(pid, number)
