"""The diagnosis of signals: a thread asks Slurm why this agent was signalled, so that the main loop never waits.

One agent of a job asks (see `asks_slurm`), so that a preempted job of a thousand nodes does not overload slurmctld; the
leader passes the answer on to the job's other agents. An agent that gets no answer uses the configured meaning of the
signal.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

from slurm_elastic import typed_json
from slurm_elastic.agent.signals import Notices
from slurm_elastic.rendezvous.identity import job_of
from slurm_elastic.rendezvous.membership import LeaveReason
from slurm_elastic.rundir import RunDir, RunDirError
from slurm_elastic.slurm import Cause, Controller, Diagnosis, NodeState, SignalDefaults, SlurmJob, classify, presume

__all__ = ["SignalDiagnosis", "asks_slurm", "concerns_job", "leave_reason", "requested_cause"]

logger = logging.getLogger("slurm_elastic")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0

_REASONS = {
    Cause.PREEMPTED: LeaveReason.PREEMPTED,
    Cause.TIME_LIMIT_NEAR: LeaveReason.TIME_LIMIT,
    Cause.TIME_LIMIT_REACHED: LeaveReason.TIME_LIMIT,
    Cause.CANCELLED: LeaveReason.CANCELLED,
    Cause.REQUEUED: LeaveReason.REQUEUED,
    Cause.NODE_FAILED: LeaveReason.CANCELLED,
    Cause.DRAINED: LeaveReason.DRAINED,
    Cause.SIGNALLED: LeaveReason.DRAINED,
    Cause.REQUEUE_WANTED: LeaveReason.REQUEUED,
    # The most frequent cause of a SIGTERM for which Slurm gives no reason.
    Cause.UNKNOWN: LeaveReason.PREEMPTED,
}
_OWN = frozenset({Cause.SIGNALLED, Cause.DRAINED, Cause.UNKNOWN})
_REQUESTED = {LeaveReason.DRAINED: Cause.DRAINED, LeaveReason.REQUEUED: Cause.REQUEUE_WANTED}


def leave_reason(cause: Cause) -> LeaveReason:
    """Return the reason of the leave of an agent that was signalled for this cause."""
    return _REASONS[cause]


def concerns_job(cause: Cause) -> bool:
    """Return True if all agents of the job have to leave, and not only the one that was signalled."""
    return cause not in _OWN


def requested_cause(reason: LeaveReason) -> Cause | None:
    """Return the cause of a request to leave for this reason; None if a person cannot request this reason."""
    return _REQUESTED.get(reason)


def asks_slurm(run_dir: RunDir, job: SlurmJob, agent: str) -> bool:
    """Return True if this agent asks Slurm why the job has to end, records the answer, and requeues the job.

    This is the agent of the job's first node or, if that has none, the first agent of the job in the newest round. The
    function reads the run directory, so it may block.

    Args:
        run_dir: The run directory.
        job: The Slurm job this agent runs in.
        agent: The identity of this agent.
    """
    if job.node_rank == 0:
        return True
    try:
        newest = run_dir.last_round()
        record = None if newest is None else run_dir.round_record(newest)
    except RunDirError:
        return False
    places = typed_json.loads(record).get("places", []) if record is not None else []
    of_job = [other for other in (str(place["agent"]) for place in places) if job_of(other) == job_of(agent)]
    return of_job[:1] == [agent]


class SignalDiagnosis:
    """The signals of this agent and their causes.

    Args:
        notices: The signals that this process has received.
        job: The Slurm job this agent runs in; None outside Slurm.
        meaning: The meaning of signals for which Slurm gives no reason.
        controller: Slurm's controller; None outside Slurm.
        record: Records signals and their diagnosis; may block. Called in the thread, by the agent that asks.
        is_asker: Returns True if this is the agent that asks; may block. Called in the thread after the first signal.
        answer_timeout: Seconds in which the agent that asks gets an answer or gives its first question up, and the
            leader passes the result on; then the others use the configured meaning of the signal.
    """

    def __init__(
        self,
        notices: Notices,
        job: SlurmJob | None,
        meaning: SignalDefaults,
        controller: Controller | None = None,
        record: Callable[[Sequence[signal.Signals], Diagnosis], None] | None = None,
        is_asker: Callable[[], bool] = lambda: True,
        answer_timeout: float = 6.0,
    ) -> None:
        self._notices, self._job, self._meaning = notices, job, meaning
        self._controller, self._record, self._is_asker = controller, record, is_asker
        self._answer_timeout = answer_timeout
        self._findings: queue.SimpleQueue[Diagnosis] = queue.SimpleQueue()
        self._wakeup = threading.Event()
        self._closed = self._answered = self._asks = False
        self._requested: Diagnosis | None = None
        self._known: Diagnosis | None = None
        self._signals_seen = 0
        self._thread: threading.Thread | None = None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Readable while there are findings; for a selector."""

    @property
    def asks(self) -> bool:
        """True if this agent asks Slurm, and other agents rely on it; False before the first finding."""
        return self._asks

    def check(self) -> Diagnosis | None:
        """Look for new signals; call this after each wake-up of the main loop.

        Returns:
            Their presumed diagnosis, without the seconds left; None if there are no new ones.
        """
        asked = sum(received.signal is not signal.SIGCONT for received in self._notices.all())
        if asked == self._signals_seen:
            return None
        self._signals_seen = asked
        self._start_thread()
        finding = self._presume()
        return Diagnosis(finding.cause, None, finding.detail)

    def next_finding(self) -> Diagnosis | None:
        """Return the next diagnosis of the thread; None if there is none."""
        try:
            finding = self._findings.get_nowait()
        except queue.Empty:
            return None
        os.eventfd_read(self.fd)
        return finding

    def note_answer(self, requested: Cause | None = None) -> None:
        """Note that the leader has told this agent why it leaves and how many seconds are left.

        Args:
            requested: The cause that a person has requested; None if another agent has found it out.
        """
        self._answered = True
        if requested is not None:
            self._requested = Diagnosis(requested, None, "asked for")
            self._start_thread()

    def close(self, timeout: float = 2.0) -> None:
        """Record the last diagnosis, and end the thread, within `timeout` seconds."""
        self._closed = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _start_thread(self) -> None:
        self._wakeup.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slurm-elastic-diagnosis", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._wakeup.wait()
            self._wakeup.clear()
            if self._closed:
                break
            # An agent that has asked once stays the one that asks: the others rely on it.
            self._asks = self._asks or (self._controller is not None and self._is_asker())
            if self._requested is not None:
                self._write(self._requested)
            if self._notices.first() is None:
                continue
            if self._asks and self._controller is not None and self._job is not None:
                self._ask(self._controller, self._job)
            else:
                self._wait_for_leader()
        # Record it again: workers may have saved a checkpoint in the meantime.
        if self._requested is not None or self._notices.first() is not None:
            self._write(self._presume())

    def _wait_for_leader(self) -> None:
        if self._job is not None:
            end = time.monotonic() + self._answer_timeout
            while not self._closed and (left := end - time.monotonic()) > 0:
                self._wakeup.wait(left)
                self._wakeup.clear()
            if not self._answered and not self._closed:
                self._report(self._presume())

    def _ask(self, controller: Controller, job: SlurmJob) -> None:
        self._write(self._presume())
        pause, presumed = _FIRST_PAUSE, self._known is not None
        while not self._closed:
            signals, elapsed = self._signals()
            view = controller.job(job.name)
            if view is not None:
                clock, grace = controller.clock(), None
                if clock is not None and view.preempt_time is not None and view.end_time is None:
                    grace = controller.grace(view, clock.preempt_type)
                    # The question about the grace may have taken seconds.
                    clock = controller.clock()
                # The seconds count from the moment at which Slurm has answered.
                _, elapsed = self._signals()
                diagnose = functools.partial(classify, signals, elapsed, view, job.restart_count, meaning=self._meaning)
                finding = diagnose(clock=clock, grace=grace)
                if finding.cause is Cause.SIGNALLED:
                    drained = controller.node_states([job.node]).get(job.node) is NodeState.DRAINED
                    finding = diagnose(clock=clock, drained=drained)
                self._known = finding
                self._report(finding)
                self._write(finding)
                return
            if not presumed:
                presumed = True
                self._report(self._presume())
            if not controller.is_silent:
                return
            self._wakeup.wait(pause)
            self._wakeup.clear()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _signals(self) -> tuple[tuple[signal.Signals, ...], float]:
        """Return all signals, and the seconds since the newest that asks this agent to leave."""
        received = self._notices.all()
        asked = [one.at for one in received if one.signal is not signal.SIGCONT]
        return tuple(one.signal for one in received), time.monotonic() - max(asked, default=time.monotonic())

    def _presume(self) -> Diagnosis:
        return presume(*self._signals(), self._meaning)

    def _report(self, finding: Diagnosis) -> None:
        # The reader takes a finding and then decrements the eventfd, which must not be 0 by then.
        os.eventfd_write(self.fd, 1)
        self._findings.put(finding)

    def _write(self, finding: Diagnosis) -> None:
        if self._record is not None and self._asks:
            self._record(self._signals()[0], self._requested or self._known or finding)
