"""The diagnosis of signals: a thread asks Slurm why this agent was signalled, so that the main loop never waits.

One agent of a job asks (see `asks_slurm`), so that a preempted job of a thousand nodes does not bring slurmctld down;
the leader passes the answer on to the job's other agents. An agent that hears nothing takes the configured meaning of
the signal.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

from slurm_elastic.agent.signals import Notices
from slurm_elastic.rendezvous.identity import job_of
from slurm_elastic.rendezvous.membership import LeaveReason
from slurm_elastic.rundir import RunDir, RunDirError
from slurm_elastic.slurm import Cause, Controller, Diagnosis, NodeState, SignalDefaults, SlurmJob, classify, presume

__all__ = ["SignalDiagnosis", "asks_slurm", "concerns_job", "leave_reason", "requested_cause"]

logger = logging.getLogger("slurm_elastic")

_HEARSAY = 6.0
"""Seconds in which the agent that asks has an answer or has given up its first question, and the others know."""
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
    # What a SIGTERM without an explanation means most of the time.
    Cause.UNKNOWN: LeaveReason.PREEMPTED,
}
_OWN = frozenset({Cause.SIGNALLED, Cause.DRAINED, Cause.UNKNOWN})
_REQUESTED = {LeaveReason.DRAINED: Cause.DRAINED, LeaveReason.REQUEUED: Cause.REQUEUE_WANTED}


def leave_reason(cause: Cause) -> LeaveReason:
    """Return why an agent leaves that was signalled for this cause."""
    return _REASONS[cause]


def concerns_job(cause: Cause) -> bool:
    """Return True if all agents of the job have to leave, and not only the one that was signalled."""
    return cause not in _OWN


def requested_cause(reason: LeaveReason) -> Cause | None:
    """Return the cause that a request to leave for this reason has; None if no person asks for this reason."""
    return _REQUESTED.get(reason)


def asks_slurm(run_dir: RunDir, job: SlurmJob, agent: str) -> bool:
    """Return True if this agent asks Slurm why the job has to go, writes that down, and sees to the requeue.

    It is the agent of the job's first node, and without that the first one in the newest round. Reads the run
    directory, so it may block.

    Args:
        run_dir: of the run.
        job: the Slurm job this agent runs in.
        agent: its identity.
    """
    if job.node_rank == 0:
        return True
    try:
        newest = run_dir.last_round()
        record = None if newest is None else run_dir.round_record(newest)
    except RunDirError:
        return False
    places = json.loads(record).get("places", []) if record is not None else []
    of_job = [other for other in (str(place["agent"]) for place in places) if job_of(other) == job_of(agent)]
    return of_job[:1] == [agent]


class SignalDiagnosis:
    """The signals of this agent and their causes.

    Args:
        notices: the signals of this agent.
        job: the Slurm job this agent runs in; None outside Slurm.
        meaning: of signals, where Slurm does not tell.
        controller: to ask; None outside Slurm.
        record: writes down signals and what they mean; may block. Called in the thread, by the agent that asks.
        is_asker: returns True if this is the agent that asks; may block. Called in the thread, once that matters.
    """

    def __init__(
        self,
        notices: Notices,
        job: SlurmJob | None,
        meaning: SignalDefaults,
        controller: Controller | None = None,
        record: Callable[[Sequence[signal.Signals], Diagnosis], None] | None = None,
        is_asker: Callable[[], bool] = lambda: True,
    ) -> None:
        self._notices, self._job, self._meaning = notices, job, meaning
        self._controller, self._record, self._is_asker = controller, record, is_asker
        self._findings: queue.SimpleQueue[Diagnosis] = queue.SimpleQueue()
        self._new = threading.Event()
        self._closed = self._told = self._asks = False
        self._requested: Diagnosis | None = None
        self._known: Diagnosis | None = None
        self._seen = 0
        self._thread: threading.Thread | None = None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Readable while findings wait; for use in a selector."""

    @property
    def asks(self) -> bool:
        """True if this agent asks Slurm, and others rely on it; known once something was found out."""
        return self._asks

    def look(self) -> Diagnosis | None:
        """Note signals that came; to be called after each wake-up.

        Returns:
            What they mean as far as is known at once, None if there are no new ones. How long is left is not known yet.
        """
        asked = sum(received.signal is not signal.SIGCONT for received in self._notices.all())
        if asked == self._seen:
            return None
        self._seen = asked
        self._wake()
        finding = self._presume()
        return Diagnosis(finding.cause, None, finding.detail)

    def news(self) -> Diagnosis | None:
        """Return the next finding of the thread, None if there is none."""
        try:
            finding = self._findings.get_nowait()
        except queue.Empty:
            return None
        os.eventfd_read(self.fd)
        return finding

    def told(self, requested: Cause | None = None) -> None:
        """Note that the leader has said why this agent leaves and how long is left.

        Args:
            requested: the cause that a person asked for; None if it was another agent.
        """
        self._told = True
        if requested is not None:
            self._requested = Diagnosis(requested, None, "asked for")
            self._wake()

    def close(self, timeout: float = 2.0) -> None:
        """Write down what was found, and end the thread, within `timeout` seconds."""
        self._closed = True
        self._new.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _wake(self) -> None:
        self._new.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="slurm-elastic-diagnosis", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closed:
            self._new.wait()
            self._new.clear()
            if self._closed:
                break
            # Once it has asked, the others count on it.
            self._asks = self._asks or (self._controller is not None and self._is_asker())
            if self._requested is not None:
                self._write(self._requested)
            if self._notices.first() is None:
                continue
            if self._asks and self._controller is not None and self._job is not None:
                self._ask(self._controller, self._job)
            else:
                self._wait_for_hearsay()
        # Once more, as the workers may have saved in the meantime.
        if self._requested is not None or self._notices.first() is not None:
            self._write(self._presume())

    def _wait_for_hearsay(self) -> None:
        if self._job is not None:
            end = time.monotonic() + _HEARSAY
            while not self._closed and (left := end - time.monotonic()) > 0:
                self._new.wait(left)
                self._new.clear()
            if not self._told and not self._closed:
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
                    # That question may have taken seconds.
                    clock = controller.clock()
                # What Slurm said is about the moment of the question.
                _, elapsed = self._signals()
                say = functools.partial(classify, signals, elapsed, view, job.restart_count, meaning=self._meaning)
                finding = say(clock=clock, grace=grace)
                if finding.cause is Cause.SIGNALLED and _is_drained(controller, job.node):
                    finding = say(clock=clock, drained=True)
                self._known = finding
                self._report(finding)
                self._write(finding)
                return
            if not presumed:
                presumed = True
                self._report(self._presume())
            if not controller.is_silent:
                return
            self._new.wait(pause)
            self._new.clear()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _signals(self) -> tuple[tuple[signal.Signals, ...], float]:
        """All signals, and the seconds since the newest that asks to go."""
        received = self._notices.all()
        asked = [one.at for one in received if one.signal is not signal.SIGCONT]
        return tuple(one.signal for one in received), time.monotonic() - max(asked, default=time.monotonic())

    def _presume(self) -> Diagnosis:
        return presume(*self._signals(), self._meaning)

    def _report(self, finding: Diagnosis) -> None:
        # The reader takes the finding first and counts down then, so the count has to be there before the finding.
        os.eventfd_write(self.fd, 1)
        self._findings.put(finding)

    def _write(self, finding: Diagnosis) -> None:
        if self._record is not None and self._asks:
            self._record(self._signals()[0], self._requested or self._known or finding)


def _is_drained(controller: Controller, node: str) -> bool:
    return controller.node_states([node]).get(node) is NodeState.DRAINED
