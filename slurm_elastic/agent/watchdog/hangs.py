"""Handles workers that hang: records their stacks, kills them, and reports both."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.agent.forkserver.linux import process_state
from slurm_elastic.agent.watchdog.stacks import Watched, collect_stacks, dump_python_stacks
from slurm_elastic.agent.watchdog.timers import Request, Timer
from slurm_elastic.control.agent_side import Agreement
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


@dataclass(eq=False, slots=True)
class WatchedRound:
    """The workers of one round. The watchdog's lock guards it.

    Attributes:
        workers: By process id; empty when the round is over.
        agreement: Knows their progress, and asks them for their dumps.
        over: Set when no worker of the round is killed any more.
        hung: Those that hang, by process id: None while one is handled, then its hang if it was killed.
        ended_at: Monotonic time at which a worker was found to have ended; None before.
    """

    workers: Mapping[int, Watched] = field(default_factory=dict)
    agreement: Agreement = field(default_factory=lambda: Agreement(()))
    over: threading.Event = field(default_factory=threading.Event)
    hung: dict[int, Hang | None] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    said: set[str] = field(default_factory=set)

    def is_new(self, what: str) -> bool:
        """Return True once for each thing that is to be told."""
        new = what not in self.said
        self.said.add(what)
        return new


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


_DUMPS_TIMEOUT = 1.0
"""Seconds for the workers of all nodes to write their dumps, before one is killed. Each node finds the hang by itself,
at nearly the same time, and the first worker that is killed ends the collective that the others wait in."""
DUMP_TIMEOUT = 1.0
"""Seconds for Python's faulthandler to write its stacks, before the client's signal."""
_SIGNAL_TIMEOUT = 2.0
"""Seconds for a worker to end by the client's signal, before SIGKILL."""


@dataclass(frozen=True, slots=True)
class HangHandler:
    """Handles workers of a round that have begun to hang.

    Attributes:
        lock: The watchdog's lock; a worker is signalled only by the thread that holds it.
        report: Called with every hang, on the thread of `run`.
        record: Called with each event of torch's own watchdog, and the request of the timer, on the same thread.
        expired: The expired timers of each worker, in order of expiry.
    """

    lock: threading.Lock
    report: Callable[[Hang], None]
    record: Callable[[str, Request], None]
    round: WatchedRound
    expired: Mapping[Watched, Sequence[Timer]]

    def run(self) -> None:
        """Record their stacks, kill them and report both; takes seconds."""
        for worker, timers in self.expired.items():
            for timer in timers:
                why = "it takes no step" if timer.steps is not None else f"timer {timer.request.scope!r} expired"
                logger.info("rank %s does not go on: %s", worker.rank, why)
        by = time.monotonic() + _DUMPS_TIMEOUT
        self.round.agreement.ask_workers()
        pids = {timer.request.pid for timers in self.expired.values() for timer in timers}
        pids.update(worker.pid for worker in self.expired)
        stacks = collect_stacks(sorted(pids))
        # The whole second, where any worker answers: this node's workers may have written theirs, others' not yet.
        if any(worker.answers for worker in self.round.agreement.progress()):
            self.round.over.wait(max(0.0, by - time.monotonic()))
        waiting = {worker.local_rank: worker.in_collective for worker in self.round.agreement.progress()}
        hangs = [
            self._end(worker, timers, stacks, waiting.get(worker.local_rank)) for worker, timers in self.expired.items()
        ]
        for hang in hangs:
            if hang is not None and hang.killed is not None:
                self._ensure_ended(hang.worker.pid, hang.killed)

    def _end(
        self, worker: Watched, timers: Sequence[Timer], stacks: Mapping[int, str], waits: bool | None
    ) -> Hang | None:
        """Send the first signal to a worker, and report its hang; None if it has ended, or the round is over.

        `waits` says whether it is in a collective.
        """
        # As in torch's server, the first timer that names a signal decides.
        timer = next((timer for timer in timers if timer.request.signal > 0), timers[0])
        killed = signal.Signals(timer.request.signal) if timer.request.signal > 0 else None
        path = write_stacks(worker, "\n".join(stacks[pid] for pid in dict.fromkeys((timer.request.pid, worker.pid))))
        with self.lock:
            process = process_state(worker.pid)
            if self.round.over.is_set() or process is None or process.state == "Z":
                return None
            seconds = max(0.0, timer.expires - timer.acquired)  # The request may have been read after it expired.
            request = timer.request
            hang = Hang(worker, request.scope, request.pid, seconds, process.state, killed, path, timer.steps, waits)
            if killed is None:
                # The worker lives on: its later timers count again.
                del self.round.hung[worker.pid]
            else:
                self.round.hung[worker.pid] = hang
                if not dump_python_stacks(worker.pid):
                    kill(worker.pid, killed)
        self.report(hang)
        for expired in timers:
            self.record("timer expired", expired.request)
        if killed is not None:
            self.record("kill worker process", timer.request)
        return hang

    def _ensure_ended(self, pid: int, killed: signal.Signals) -> None:
        for seconds, number in ((DUMP_TIMEOUT, killed), (_SIGNAL_TIMEOUT, signal.SIGKILL)):
            by = time.monotonic() + seconds
            while time.monotonic() < by:
                process = process_state(pid)
                if self.round.over.wait(0.02) or process is None or process.state == "Z":
                    return
            with self.lock:
                if not self.round.over.is_set():
                    kill(pid, number)
