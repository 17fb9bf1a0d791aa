"""The watchdog: a thread that reads the pipe, and finds expired timers and workers without a step."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from slurm_elastic.agent.forkserver.linux import ancestors, process_state
from slurm_elastic.agent.watchdog.hangs import Hang, HangHandler, WatchedRound, write_stacks
from slurm_elastic.agent.watchdog.stacks import Watched, collect_stacks
from slurm_elastic.agent.watchdog.stalls import HangTimeout, StepWatch
from slurm_elastic.agent.watchdog.timers import LineReader, Pipe, Request, Timer
from slurm_elastic.control.agent_side import Agreement

logger = logging.getLogger("slurm_elastic")

_TICK = 5.0
"""Longest sleep of the thread in seconds, so that `age` shows that it is alive."""
_LATE = 1.0
"""Seconds by which the thread wakes late if it was paused, and the workers perhaps too."""
_MOST_TIMERS = 10_000
"""Timers of one node at a time. A script has a few; more are a mistake or an attack."""
_READ_BYTES = 1 << 16
_STEP_SCOPE = "step"
_SAID_AFTER = 10.0
_WATCHED_AFTER = 60.0
_MOST_NAMED = 8


class Watchdog:
    """The watchdog of one agent, for all its rounds.

    Args:
        stacks_after: Seconds after which the stacks of a worker are written that lives while another one has ended.
    """

    def __init__(
        self,
        pipe: Pipe,
        report: Callable[[Hang], None],
        hang_timeout: HangTimeout | None,
        stacks_after: float,
    ) -> None:
        self.path = str(pipe.path)
        self._pipe = pipe
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lines = LineReader()
        # Guards the attributes below. A worker is killed only with the lock, and a round is closed only after
        # `unwatch`: so no signal goes to another process that has got a worker's id.
        self._lock = threading.Lock()
        self._timers: dict[tuple[int, str], Timer] = {}
        """By process and scope."""
        self._round = WatchedRound()
        self._report = report
        self._handlers: tuple[threading.Thread, ...] = ()
        self._steps = StepWatch(hang_timeout) if hang_timeout is not None else None
        self._stacks_after = stacks_after
        self._paused = 0.0
        """Seconds in which this process was paused, with its job (scontrol suspend), its machine, or alone."""
        self._unknown_senders = 0
        self._has_warned = self._stopping = False
        self._record: Callable[[str, Request | None], None] | None = None
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="slurm-elastic-watchdog", daemon=True)

    @property
    def dropped(self) -> int:
        """The number of lines that are no requests, and of requests of processes that are no workers."""
        return self._lines.dropped + self._unknown_senders

    def start(self, record: Callable[[str, Request | None], None] | None = None) -> None:
        """Start the thread; `record` is given the events of torch's own watchdog, each with its timer's request."""
        self._record = record
        self._thread.start()

    def age(self) -> float:
        """Return the seconds since the thread was last active, normally at most 5; 0 after `stop`."""
        return 0.0 if self._stopping else time.monotonic() - self._alive_at

    def watch(self, workers: Iterable[Watched], agreement: Agreement | None = None) -> None:
        """Watch these workers from now on; `agreement` knows their progress, None if they have no control pages."""
        with self._lock:
            by_pid = {worker.pid: worker for worker in workers}
            self._round = WatchedRound(by_pid, agreement or Agreement(()), began=self._now())
            if self._steps is not None:
                self._steps.begin()
        self.wake()

    def unwatch(self) -> None:
        """Kill no worker any more: the round is over."""
        with self._lock:
            self._round.over.set()
            self._round.workers = {}
            self._timers.clear()

    def hang_of(self, pid: int) -> Hang | None:
        """Return the hang for which the watchdog killed this worker of the newest round, None if it did not."""
        with self._lock:
            return self._round.hung.get(pid)

    def stop(self) -> None:
        """End the thread, and remove the pipe; a second call does nothing."""
        if self._stopping:
            return
        self.unwatch()
        self._stopping = True
        self.wake()
        for thread in (self._thread, *self._handlers):
            if thread.ident is not None:
                thread.join(1.0)
        if not self._thread.is_alive():
            self._pipe.close()
            os.close(self._wakeup_fd)

    def wake(self) -> None:
        """Let the thread check the workers now."""
        os.eventfd_write(self._wakeup_fd, 1)

    def _now(self) -> float:
        """Return the agent's own monotonic time, without that in which it was paused."""
        return time.monotonic() - self._paused

    # On the watchdog's thread.

    def _run(self) -> None:
        self._record_event("watchdog started")
        self._alive_at = time.monotonic()
        poll = select.poll()
        poll.register(self._pipe.fd, select.POLLIN)
        poll.register(self._wakeup_fd, select.POLLIN)
        interval = _TICK
        while not self._stopping:
            with self._lock:
                expires = [timer.expires for timer in self._timers.values()] if self._round.workers else []
            timeout = max(0.0, min(interval, min(expires, default=float("inf")) - self._now()))
            poll.poll(timeout * 1000)
            before, self._alive_at = self._alive_at, time.monotonic()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup_fd)
            paused = self._alive_at - before
            if paused < timeout + _LATE:
                paused = 0.0
            self._paused += paused
            self._read(paused)
            interval = min(_TICK, self._check(self._alive_at - self._paused))
            if self.dropped and not self._has_warned:
                self._has_warned = True
                logger.warning("the watchdog ignores what is no request of a worker, in %s", self.path)
        self._record_event("watchdog stopped")

    def _record_event(self, name: str, request: Request | None = None) -> None:
        try:
            if self._record is not None:
                self._record(name, request)
        except Exception:
            logger.exception("a watchdog event was not recorded")

    def _read(self, paused: float) -> None:
        try:
            content = os.read(self._pipe.fd, _READ_BYTES)
        except BlockingIOError:
            return
        with self._lock:
            for request in self._lines.feed(content):
                self._register(request, paused)

    def _register(self, request: Request, paused: float) -> None:
        """Start or release a timer; its sender may have written the request before a pause of `paused` seconds."""
        process = process_state(request.pid)
        key = request.pid, request.scope
        if request.expires_at < 0:
            # A release may come late, when the round is over and its sender is no worker any more.
            self._timers.pop(key, None)
        elif process is None or (len(self._timers) >= _MOST_TIMERS and key not in self._timers):
            self._unknown_senders += 1
        else:
            # Client and watchdog read the same wall clock at this moment; changes of it later do not matter.
            now = self._now()
            expires = now + request.expires_at - time.time() + paused
            self._timers[key] = Timer(request, process.started, now, expires)

    def _check(self, now: float) -> float:
        """Handle workers that hang; return the seconds until the steps of workers have to be checked again."""
        with self._lock:
            self._look_at_ends(now)
            stalled, interval = self._stalled_workers(now)
            # While workers are being started, they may have timers already, and are not known yet.
            workers = self._round.workers
            running = self._timers.values() if workers else ()
            due = sorted((timer for timer in running if timer.expires <= now), key=lambda timer: timer.expires)
            expired: dict[Watched, list[Timer]] = {}
            for timer in (*due, *stalled):
                pid = timer.request.pid
                self._timers.pop((pid, timer.request.scope), None)
                process = process_state(pid)
                if process is None or process.state == "Z" or process.started != timer.started:
                    continue
                worker = next((workers[pid] for pid in ancestors(pid) if pid in workers), None)
                if worker is None:
                    self._unknown_senders += 1
                elif worker.pid not in self._round.hung:
                    expired.setdefault(worker, []).append(timer)
            if expired:
                self._round.hung.update(dict.fromkeys(worker.pid for worker in expired))
                # In a thread of its own, so that this one reads on.
                work = HangHandler(self._lock, self._report, self._record_event, self._round, expired).run
                handler = threading.Thread(target=work, name="slurm-elastic-hang", daemon=True)
                self._handlers = (*(thread for thread in self._handlers if thread.is_alive()), handler)
                handler.start()
        return interval

    def _stalled_workers(self, now: float) -> tuple[list[Timer], float]:
        """Return the workers that take no step any more, each as a timer that began with its last step."""
        if self._steps is None or not self._round.workers:
            return [], _TICK
        progress = self._round.agreement.progress()
        if time.monotonic() > self._alive_at + _LATE:
            # This thread was paused just now.
            return [], 0.0
        stalled, interval = self._steps.check(progress, now)
        pids = {worker.local_rank: worker.pid for worker in self._round.workers.values()}
        timers = []
        for worker, seconds in stalled:
            pid = pids[worker.local_rank]
            process = process_state(pid)
            if process is not None:
                request = Request(pid, _STEP_SCOPE, time.time(), signal.SIGKILL)
                timers.append(Timer(request, process.started, now - seconds, now, worker.boundary))
        return timers, interval

    def _look_at_ends(self, now: float) -> None:
        """Tell of workers that have ended while others live, and of a time-out that watches none.

        A worker that never ends, such as one that joins a thread for ever, holds up a run without a word.
        """
        round_, workers = self._round, self._round.workers.values()
        living = [worker for worker in workers if (state := process_state(worker.pid)) and state.state != "Z"]
        ended = [worker for worker in workers if worker not in living]
        if ended and round_.ended_at is None:
            round_.ended_at = now
        since = 0.0 if round_.ended_at is None else now - round_.ended_at
        unwatched = self._steps is not None and not any(worker.attached for worker in round_.agreement.progress())
        if unwatched and living and now - round_.began >= _WATCHED_AFTER and round_.is_new("unwatched"):
            logger.warning("--hang-timeout watches nothing so far: no worker here has imported slurm_elastic.trainer")
        if since >= _SAID_AFTER and living and round_.is_new("some ended"):
            logger.warning("%s ended 10 s ago, and %s still runs", _ranks(ended), _ranks(living))
        if since >= _SAID_AFTER and not living and round_.is_new("all ended"):
            logger.info("%s ended 10 s ago: the round waits for the ranks of other nodes", _ranks(ended))
        if since >= self._stacks_after and living and round_.is_new("stacks"):
            round_.agreement.ask_workers()
            threading.Thread(target=self._write_stacks, args=(living,), name="slurm-elastic-hang", daemon=True).start()

    def _write_stacks(self, workers: Sequence[Watched]) -> None:
        stacks = collect_stacks(worker.pid for worker in workers)
        paths = [write_stacks(worker, stacks[worker.pid]) for worker in workers]
        logger.warning("%s has still not ended; stacks in %s", _ranks(workers), paths[0] or "this log")


def _ranks(workers: Sequence[Watched]) -> str:
    names = [str(worker.rank) for worker in workers[:_MOST_NAMED]]
    return f"rank {names[0]}" if len(workers) == 1 else f"ranks {', '.join(names)}{'...' * (len(workers) > len(names))}"
