"""The diagnosis of signals and of the time limit: a thread asks Slurm, so that the main loop never waits.

One agent of a job asks (see `asks_slurm`), and the leader passes the answer on to the others. An agent that gets no
answer presumes the least that the site gives, which the first node's agent has asked for at the start; else the
configured meaning of the signal.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from slurm_elastic import slurm
from slurm_elastic.agent.event_log import utc_now
from slurm_elastic.agent.signals import Notices
from slurm_elastic.rendezvous.membership.agents import LeaveReason, job_of
from slurm_elastic.rundir import JobRecords, RunDir, RunDirError

logger = logging.getLogger("slurm_elastic")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0
_LOOK = 30.0
"""Seconds after which an agent looks again how long the newest save took, and, warned, whether it has to ask."""

LEAVE_REASONS = {
    slurm.Cause.PREEMPTED: LeaveReason.PREEMPTED,
    slurm.Cause.TIME_LIMIT_NEAR: LeaveReason.TIME_LIMIT,
    slurm.Cause.TIME_LIMIT_REACHED: LeaveReason.TIME_LIMIT,
    slurm.Cause.CANCELLED: LeaveReason.CANCELLED,
    slurm.Cause.REQUEUED: LeaveReason.REQUEUED,
    slurm.Cause.NODE_FAILED: LeaveReason.CANCELLED,
    slurm.Cause.DRAINED: LeaveReason.DRAINED,
    slurm.Cause.SIGNALLED: LeaveReason.CANCELLED,
    slurm.Cause.REQUEUE_WANTED: LeaveReason.REQUEUED,
    slurm.Cause.UNKNOWN: LeaveReason.NODE_LEFT,
}
"""The reason of the leave of an agent that was signalled for a cause."""
_OWN = frozenset({slurm.Cause.SIGNALLED, slurm.Cause.DRAINED, slurm.Cause.UNKNOWN})
"""Causes for which only the agent that was signalled leaves, and not all of its job."""
_REQUESTED = {LeaveReason.DRAINED: slurm.Cause.DRAINED, LeaveReason.REQUEUED: slurm.Cause.REQUEUE_WANTED}
"""The causes of requests to leave, for the reasons that a person can request."""


def asks_slurm(run_dir: RunDir, job: slurm.SlurmJob, agent: str) -> bool:
    """Return True if this agent asks Slurm why the job has to end, records the answer, and requeues the job. May block.

    This is the agent of the job's first node or, if that has none, the first agent of the job in the newest round.
    """
    if job.node_rank == 0:
        return True
    try:
        newest = run_dir.newest("rounds")
        record = None if newest is None else run_dir.read_record("rounds", newest)
    except RunDirError:
        return False
    places = (record or {}).get("places", [])
    of_job = [other for other in (str(place["agent"]) for place in places) if job_of(other) == job_of(agent)]
    return of_job[:1] == [agent]


class SignalDiagnosis:
    """The signals of this agent and their causes, which the agent that asks keeps in the run directory.

    Args:
        job: The job; None outside Slurm, where nobody is asked.
        newest_save: Returns the seconds that the newest save took; None if unknown.
        answer_timeout: Seconds in which the agent that asks gets an answer or gives its first question up, and the
            leader passes the result on; then the others presume what the signal means.
    """

    def __init__(
        self,
        notices: Notices,
        run_dir: RunDir,
        job: slurm.SlurmJob | None,
        agent: str,
        meaning: slurm.SignalDefaults,
        checkpoint: Callable[[], int | None],
        newest_save: Callable[[], float | None],
        *,
        controller: slurm.Controller | None = None,
        answer_timeout: float = 6.0,
    ) -> None:
        self._notices, self._run_dir, self._job, self._agent, self._meaning = notices, run_dir, job, agent, meaning
        self._checkpoint, self._newest_save = checkpoint, newest_save
        self._controller, self._answer_timeout = controller or slurm.Controller(), answer_timeout
        self._findings: queue.SimpleQueue[slurm.Diagnosis] = queue.SimpleQueue()
        self._wakeup = threading.Event()
        self._closed = self._answered = False
        self.asks = False
        """True if this agent asks Slurm, and other agents rely on it; False before the first finding."""
        self._requested: slurm.Diagnosis | None = None
        self._known: slurm.Diagnosis | None = None
        self._least: float | None = None
        self._end: float | None = None
        """When the time limit ends the job, in own monotonic time; None if Slurm has not said so."""
        self._limit, self._learns, self._explained = 0.0, False, 0
        self._said = ""
        self._signals_seen = 0
        self._thread: threading.Thread | None = None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Readable while there are findings; for a selector."""

    def tells_job(self, cause: slurm.Cause) -> bool:
        """Return True if all agents of the job learn from this one that they have to leave for this cause.

        A signal that warns of the time limit reaches all of them (sbatch --signal, scancel), and they leave its meaning
        to the agent that asks Slurm.
        """
        return self.asks and (cause not in _OWN or (cause is slurm.Cause.SIGNALLED and self._is_warned()))

    @property
    def has_news(self) -> bool:
        """True if this agent has to leave, or its thread has found out why."""
        return (self._notices.first() is not None and not self._is_warned()) or not self._findings.empty()

    @property
    def is_asked(self) -> bool:
        """True if Slurm is asked about signals, by this agent or another one of its job."""
        return self._job is not None

    def start(self) -> None:
        """Have the thread of the job's first agent ask for grace and time limit."""
        self._learns = self._job is not None and self._job.node_rank == 0
        if self._learns:
            self._start_thread()

    def learn_grace(self) -> None:
        """Read what the job's first agent has asked for, unless it is known; may block, so call this before a round."""
        if self._job is None or self._least:
            return
        try:
            self._least = JobRecords(self._run_dir, self._job.job_id).grace(self._job.restart_count)
        except RunDirError as error:
            logger.warning("the grace of the job is not on record: %s", error)

    def check(self) -> slurm.Diagnosis | None:
        """Return what new signals presumably mean; None without any, or with warnings only, which Slurm has to explain.

        Call this after each wake-up of the main loop.
        """
        asked = sum(received.signal is not signal.SIGCONT for received in self._notices.all())
        if asked == self._signals_seen:
            return None
        self._signals_seen = asked
        # The first agent may have had no answer when the round began.
        self.learn_grace()
        self._start_thread()
        return None if self._is_warned() else self._presume()

    def next_finding(self) -> slurm.Diagnosis | None:
        """Return the next diagnosis of the thread; None if there is none."""
        try:
            finding = self._findings.get_nowait()
        except queue.Empty:
            return None
        os.eventfd_read(self.fd)
        return finding

    def note_request(self, reason: LeaveReason, seconds: float | None) -> None:
        """Note that the leader has asked this agent to leave; only the agent that has asked Slurm gives seconds."""
        self._answered = True
        if seconds is None and reason in _REQUESTED:
            self._requested = slurm.Diagnosis(_REQUESTED[reason], None, "asked for")
            self._start_thread()

    def close(self, timeout: float = 2.0) -> None:
        """Record the last diagnosis, and end the thread, within `timeout` seconds."""
        self._closed = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _start_thread(self) -> None:
        self._wakeup.set()
        if self._thread is None and self._job is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._job,), name="slurm-elastic-diagnosis", daemon=True
            )
            self._thread.start()

    # On the thread, which may block.

    def _run(self, job: slurm.SlurmJob) -> None:
        if self._learns:
            self._learn(job)
        while not self._closed:
            self._wakeup.wait(self._pause())
            self._wakeup.clear()
            if self._closed:
                break
            if self._requested is None and not self._has_question():
                continue
            # An agent that has asked once stays the one that asks: the others rely on it.
            self.asks = self.asks or asks_slurm(self._run_dir, job, self._agent)
            if self._requested is not None:
                self._write(job, self._requested)
            if not self._has_question():
                continue
            if self.asks:
                self._ask(job)
            else:
                self._wait_for_leader(job)
        # Record it again: workers may have saved a checkpoint in the meantime.
        if self._requested is not None or self._known is not None or self._notices.first() is not None:
            self._write(job, self._presume())

    def _learn(self, job: slurm.SlurmJob) -> None:
        controller = self._controller
        view = controller.job(job.name)
        config = controller.config() if view is not None and self._notices.first() is None else None
        if view is None or config is None or self._notices.first() is not None:
            return
        preempts = config.text("PreemptType") not in ("", "preempt/none")
        grace = controller.grace(view, config.text("PreemptType")) if preempts else None
        self._least = slurm.least_grace(config, grace)
        try:
            JobRecords(self._run_dir, job.job_id).publish_grace(job.restart_count, self._least)
        except RunDirError as error:
            logger.warning("the grace of the job is not on record: %s", error)
        self._note_end(view, controller.config())

    def _note_end(self, view: slurm.JobView, config: slurm.ClusterConfig | None) -> None:
        is_ending = view.preempt_time is not None or view.has_ended
        if config is None or is_ending or view.end_time is None or view.start_time is None:
            # The EndTime of a job that is cancelled or preempted is not its limit.
            self._end = None
        else:
            self._end = time.monotonic() + view.end_time - config.now
            self._limit = view.end_time - view.start_time

    def _save(self) -> float:
        if self._end is None:
            return 0.0
        seconds, misfit = slurm.save_time(self._limit, self._newest_save(), self._meaning.save)
        if misfit and not self._said:
            self._said = misfit
            logger.warning("%s", misfit)
        return seconds

    def _train_on(self) -> float | None:
        """Return the seconds for which the job may train until it has to save; None if Slurm has told no end."""
        return None if self._end is None else self._end - time.monotonic() - self._save()

    def _has_question(self) -> bool:
        """Return True if Slurm has not been asked about all signals, or the job has to save."""
        left = self._train_on()
        due = left is not None and left <= 0 and self._known is None
        return due or (self._notices.first() is not None and len(self._notices.all()) > self._explained)

    def _pause(self) -> float | None:
        """Return the seconds until the thread has to look again; None for never."""
        left = None if self._known is not None else self._train_on()
        if left is not None:
            return max(0.0, min(left, _LOOK))
        return _LOOK if self._is_warned() and not self._answered and self._known is None else None

    def _is_warned(self) -> bool:
        """Return True if there are only warnings: Slurm alone knows the time limit."""
        asked = {notice.signal for notice in self._notices.all()} - {signal.SIGCONT}
        return self._job is not None and bool(asked) and asked <= {signal.SIGUSR1, signal.SIGUSR2}

    def _wait_for_leader(self, job: slurm.SlurmJob) -> None:
        if not self._is_warned():
            self._explained = len(self._notices.all())
        end = time.monotonic() + self._answer_timeout
        while not self._closed and (left := end - time.monotonic()) > 0:
            self._wakeup.wait(left)
            self._wakeup.clear()
        if self._answered or self._closed:
            return
        if not self._is_warned():
            self._report(self._presume())
        elif not self._warned_on_record(job):
            # The agent that asks was not warned: a person has signalled this one alone.
            self._ask(job)

    def _ask(self, job: slurm.SlurmJob) -> None:
        controller = self._controller
        if self._notices.first() is not None:
            self._write(job, self._presume())
        pause, presumed = _FIRST_PAUSE, self._known is not None
        while not self._closed:
            signals, elapsed = self._signals()
            self._explained = len(signals)
            view = controller.job(job.name)
            if view is not None:
                config, grace = controller.config(), None
                if config is not None and view.preempt_time is not None and view.end_time is None:
                    grace = controller.grace(view, config.text("PreemptType"))
                    # The question about the grace may have taken seconds.
                    config = controller.config()
                # The seconds count from the moment at which Slurm has answered.
                _, elapsed = self._signals()
                self._note_end(view, config)
                diagnose = functools.partial(
                    slurm.classify,
                    signals,
                    elapsed,
                    view,
                    job.restart_count,
                    meaning=self._meaning,
                    save=self._save() + 1.0,
                )
                finding = diagnose(config=config, grace=grace)
                if finding.cause is slurm.Cause.SIGNALLED:
                    drained = controller.node_states([job.node]).get(job.node) is slurm.NodeState.DRAINED
                    finding = diagnose(config=config, drained=drained)
                if self._is_early(finding):
                    if signals:
                        logger.info("%s: the job trains on until %.0f s are left", finding, self._save())
                else:
                    self._known = finding
                    self._report(finding)
                if signals or self._known is not None:
                    self._write(job, finding)
                return
            if not presumed and not self._is_early(self._presume()):
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
        asked = [notice.at for notice in received if notice.signal is not signal.SIGCONT]
        return tuple(notice.signal for notice in received), time.monotonic() - max(asked, default=time.monotonic())

    def _is_early(self, finding: slurm.Diagnosis) -> bool:
        """Return True if the job trains on: the time limit is not as near as that, or not near any more."""
        left = self._train_on()
        if finding.cause is slurm.Cause.TIME_LIMIT_NEAR and left is not None and left > 1:
            return True
        return finding.cause is slurm.Cause.UNKNOWN and self._notices.first() is None

    def _presume(self) -> slurm.Diagnosis:
        signals, elapsed = self._signals()
        if self._end is not None and (not signals or self._is_warned()):
            return slurm.Diagnosis(slurm.Cause.TIME_LIMIT_NEAR, self._end - time.monotonic(), "as Slurm said before")
        least = self._meaning.grace if self._least is None else self._least
        return slurm.presume(signals, elapsed, replace(self._meaning, grace=least))

    def _report(self, finding: slurm.Diagnosis) -> None:
        # The reader takes a finding and then decrements the eventfd, which must not be 0 by then.
        os.eventfd_write(self.fd, 1)
        self._findings.put(finding)

    def _write(self, job: slurm.SlurmJob, finding: slurm.Diagnosis) -> None:
        if not self.asks:
            return
        finding = self._requested or self._known or finding
        record = {
            "signals": [number.name for number in self._signals()[0]],
            "cause": finding.cause.name,
            "text": str(finding),
            "seconds": finding.seconds,
            "progress": self._checkpoint(),
            "time": utc_now(),
        }
        try:
            JobRecords(self._run_dir, job.job_id).publish_notice(job.restart_count, record)
        except RunDirError as error:
            logger.warning("the notice is not written down: %s", error)

    def _warned_on_record(self, job: slurm.SlurmJob) -> bool:
        """Return True if the agent that asks has recorded a warning, too."""
        try:
            signals = (JobRecords(self._run_dir, job.job_id).notice(job.restart_count) or {}).get("signals")
        except RunDirError:
            return False
        return isinstance(signals, list) and not {"SIGUSR1", "SIGUSR2"}.isdisjoint(map(str, signals))
