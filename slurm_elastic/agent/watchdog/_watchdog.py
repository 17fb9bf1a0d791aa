"""The thread that reads the pipe, and finds expired timers and workers without a step."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.agent.watchdog._hang import Hang
from slurm_elastic.agent.watchdog._hang_handler import HangHandler
from slurm_elastic.agent.watchdog._proc import Watched, nearest_ancestor, process_state
from slurm_elastic.agent.watchdog._step_timeout import HangTimeout, StepWatch
from slurm_elastic.agent.watchdog._timer_pipe import Pipe
from slurm_elastic.agent.watchdog._timer_protocol import LineReader, Request
from slurm_elastic.agent.watchdog._timers import Timer, Timers
from slurm_elastic.control import WorkerProgress

if TYPE_CHECKING:
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

__all__ = ["Watchdog"]

logger = logging.getLogger("slurm_elastic")

_TICK = 5.0
"""Seconds between two signs of life of the thread when nothing happens."""
_LATE = 1.0
"""Seconds; a thread that wakes so much later than it meant to stood still, and so may have the workers."""
_MOST_HELD = 1000
_READ = 1 << 16
_STEP = "step"

Progress = Callable[[], Sequence[WorkerProgress]]

LogEvent = Callable[[str, "FileTimerRequest | None"], None]


class Watchdog:
    """The watchdog of one agent, for all its rounds.

    Args:
        pipe: where clients write; closed by `stop`.
        report: told every hang, on a thread of the watchdog.
        hang_timeout: how long a worker may go without a step; None for any time.

    Attributes:
        dropped: the number of lines and requests that were ignored: no requests, or of processes that are no workers.
    """

    def __init__(self, pipe: Pipe, report: Callable[[Hang], None], hang_timeout: HangTimeout | None = None) -> None:
        self.path, self.variable = str(pipe.path), pipe.variable
        self._pipe = pipe
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lines, self._timers = LineReader(), Timers()
        # Guards what follows. A worker is killed only while it is held, and a round is closed only after `unwatch`: so
        # no signal goes to a process that took over a worker's id.
        self._lock = threading.Lock()
        self._hangs = HangHandler(self._lock, report, self._say)
        self._workers: dict[int, Watched] = {}
        self._progress: Progress = tuple
        self._steps = StepWatch(hang_timeout) if hang_timeout is not None else None
        self._held: list[tuple[Request, float]] | None = None
        self._strangers = 0
        self._complained = self._stopping = False
        self._log_event: LogEvent = lambda _name, _request: None
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="slurm-elastic-watchdog", daemon=True)

    @property
    def dropped(self) -> int:
        """The number of lines and requests that were ignored."""
        return self._lines.dropped + self._strangers

    def start(self, log_event: LogEvent) -> None:
        """Start the thread.

        Args:
            log_event: records torch's own watchdog events, on a thread of the watchdog.
        """
        self._log_event = log_event
        self._thread.start()

    def age(self) -> float:
        """Seconds since the thread last showed that it lives; normally at most 5. 0 once it was told to stop."""
        return 0.0 if self._stopping else time.monotonic() - self._alive_at

    def expect(self) -> None:
        """Workers are being started: keep requests of processes that are not known yet."""
        with self._lock:
            self._held = []

    def watch(self, workers: Iterable[Watched], progress: Progress = tuple) -> None:
        """Watch these workers from now on.

        Args:
            workers: of the round that begins.
            progress: says how far they are, on the watchdog's thread.
        """
        with self._lock:
            self._workers = {worker.pid: worker for worker in workers}
            self._progress = progress
            if self._steps is not None:
                self._steps.begin()
            held, self._held = self._held or [], None
            for request, at in held:
                self._register(request, at)
        self._ring()

    def unwatch(self) -> None:
        """The round is over: kill no worker of it any more."""
        with self._lock:
            self._workers, self._held = {}, None
            self._timers.clear()
            self._hangs.end_round()

    def hang_of(self, pid: int) -> Hang | None:
        """Return the hang for which the watchdog killed this worker of the present round, None if it did not."""
        with self._lock:
            return self._hangs.hang_of(pid)

    def stop(self) -> None:
        """End the thread, and remove the pipe. Called again, it does nothing."""
        if self._stopping:
            return
        self.unwatch()
        self._stopping = True
        self._ring()
        for thread in (self._thread, *self._hangs.threads):
            if thread.ident is not None:
                thread.join(1.0)
        if not self._thread.is_alive():
            self._pipe.close()
            os.close(self._wake)

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    # On the watchdog's thread.

    def _run(self) -> None:
        self._say("watchdog started", None)
        self._alive_at = time.monotonic()
        poll = select.poll()
        poll.register(self._pipe.fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        interval = _TICK
        while not self._stopping:
            with self._lock:
                expiry = self._timers.next_expiry()
            timeout = interval if expiry is None else min(interval, max(0.0, expiry - time.monotonic()))
            poll.poll(timeout * 1000)
            before, self._alive_at = self._alive_at, time.monotonic()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            stood_still = self._alive_at - before
            if stood_still < timeout + _LATE:
                stood_still = 0.0
            self._put_off(stood_still)
            self._read(stood_still)
            interval = min(_TICK, self._look(self._alive_at))
        self._say("watchdog stopped", None)

    def _put_off(self, seconds: float) -> None:
        """Put timers off: this process stood still, with its job (scontrol suspend), its machine, or alone."""
        if not seconds:
            return
        with self._lock:
            self._timers.put_off(seconds)
            if self._steps is not None:
                self._steps.put_off(seconds, self._alive_at)
            if self._held is not None:
                self._held = [(request.later(seconds), at) for request, at in self._held]

    def _read(self, stood_still: float) -> None:
        try:
            content = os.read(self._pipe.fd, _READ)
        except BlockingIOError:
            return
        requests = self._lines.feed(content)
        now = time.monotonic()
        with self._lock:
            for request in requests:
                # What a worker wrote before it was stopped, too, was not read before.
                self._register(request.later(stood_still), now)
        if self.dropped and not self._complained:
            self._complained = True
            logger.warning("the watchdog ignores what is no request of a worker, in %s", self.path)

    def _register(self, request: Request, at: float) -> None:
        if self._held is not None and len(self._held) < _MOST_HELD:
            self._held.append((request, at))
            return
        process = process_state(request.pid)
        worker = nearest_ancestor(request.pid, self._workers) if process is not None else None
        if request.expires_at < 0 and worker is None:
            # A release that comes late, when the round is over, is no offence.
            self._timers.release(request)
        elif process is None or worker is None:
            self._strangers += 1
        elif request.expires_at < 0:
            self._timers.release(request)
        else:
            # Client and server share one clock; from here on it may be set as it likes.
            expires = time.monotonic() + request.expires_at - time.time()
            timer = Timer(request, worker, process.started, at, expires)
            if not self._timers.acquire(timer):
                self._strangers += 1

    def _look(self, now: float) -> float:
        """Handle workers that hang; return the seconds after which to look again whether workers take steps."""
        with self._lock:
            stuck, interval = self._stuck(now)
            expired = [*self._timers.take_expired(now), *stuck]
            found: dict[int, list[Timer]] = {}
            for timer in expired:
                process = process_state(timer.request.pid)
                gone = process is None or process.state == "Z" or process.started != timer.started
                if not gone and timer.worker in self._workers and timer.worker not in self._hangs:
                    found.setdefault(timer.worker, []).append(timer)
            if found:
                self._hangs.handle(found, dict(self._workers))
        return interval

    def _stuck(self, now: float) -> tuple[list[Timer], float]:
        """Workers that take no step any more, each as a timer that began with its last step."""
        if self._steps is None or not self._workers:
            return [], _TICK
        progress = self._progress()
        if time.monotonic() > now + _LATE:
            # Stopped in this very moment.
            return [], 0.0
        stuck, interval = self._steps.look(progress, now)
        workers = {worker.local_rank: worker.pid for worker in self._workers.values()}
        timers = []
        for one in stuck:
            pid = workers.get(one.local_rank)
            process = process_state(pid) if pid is not None else None
            if pid is not None and process is not None:
                request = Request(pid, _STEP, time.time(), signal.SIGKILL)
                timers.append(Timer(request, pid, process.started, now - one.seconds, now, one.boundary))
        return timers, interval

    def _say(self, name: str, timer: Timer | None) -> None:
        request = None
        if timer is not None:
            # Not at the top: the agent imports this file while torch is not there yet.
            from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

            asked = timer.request
            request = FileTimerRequest(asked.pid, asked.scope, asked.expires_at, asked.signal)
        try:
            self._log_event(name, request)
        except Exception:
            logger.exception("a watchdog event was not recorded")
