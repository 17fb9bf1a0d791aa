"""``slurm-elastic coordinator``, formerly ``store``: a process that leads a run and has no workers; without torch."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from slurm_elastic.agent.event_log import EventLog
from slurm_elastic.agent.root_cause import end_on_record, root_cause
from slurm_elastic.agent.signals import Notices
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.election.events import LeaderEvent, LeaderLost, RecordsLost, Unreachable
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.membership.events import Claim, Decision, Ended, Leaving, Outcome
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rendezvous.run_events import describe
from slurm_elastic.slurm import Controller

logger = logging.getLogger("slurm_elastic")

_QUEUE_INTERVAL = 10.0
"""Seconds between two questions to Slurm about the job of the run."""
_LOOK = 0.1
"""Seconds between two looks, after a signal, whether another agent leads."""


def coordinate(
    rendezvous: RendezvousConfig,
    notices: Notices,
    grace: float,
    job: str | None,
    submit: Callable[[], str] | None = None,
) -> ExitCode:
    """Lead the run, or stand by to lead it, until the run ends or a signal comes.

    Args:
        grace: Seconds from SIGTERM to the coordinator's end.
        job: The job, as squeue takes it, whose agents belong to the run; None if there is no single one.
        submit: Submits the job of the run, when the coordinator has connected; None to submit none.

    Raises:
        UsageError: The user has to change something.
        RecordsError: The records of the run cannot be read.
    """
    run_id, records = rendezvous.run_id, rendezvous.records
    if records.is_done():
        logger.info("run %s is finished already: nothing to do", run_id)
        return ExitCode.FINISHED
    events = EventLog(rendezvous.run_dir, rendezvous.node)
    job_over, takes_over = threading.Event(), threading.Event()

    def wake() -> None:
        os.write(notices.wakeup_fd, b"\0")

    def watch() -> None:
        watch_queue(job, Controller(), job_over)
        wake()

    def record(decision: Decision) -> None:
        if (entry := describe(decision)) is not None:
            events.add(entry)
        if isinstance(decision, Claim):
            takes_over.set()
            wake()

    coordination = connect(rendezvous, record)
    try:
        if coordination.leads:
            logger.info("leads run %s without workers, and waits for its agents", run_id)
        else:
            logger.info(
                "run %s has a leader already: this coordinator leads when that leader is lost or leaves", run_id
            )
        job = submit() if submit is not None else job
        # A daemon: the process does not wait for its last question to Slurm.
        threading.Thread(target=watch, name="slurm-elastic-queue", daemon=True).start()
        leave_by: float | None = None
        while True:
            while (event := coordination.next_event(timeout=0)) is not None:
                if (code := _end(event, records)) is not None:
                    return code
            if takes_over.is_set():
                # The leader that is gone may have ended with the run, before this coordinator was in touch with it.
                takes_over.clear()
                if (code := end_on_record(records)) is not None:
                    return code
            if job_over.is_set():
                logger.info("job %s is over", job)
                return ExitCode.FINISHED if records.is_done() else ExitCode.LEFT
            received = notices.first()
            if received is not None and leave_by is None:
                leave_by = time.monotonic() + grace
                plan = "an agent will lead the run" if coordination.leads else "this coordinator ends"
                logger.info("got %s: %s", received.signal.name, plan)
                coordination.send(Leaving(rendezvous.agent, LeaveReason.NODE_LEFT, grace))
            if leave_by is not None and (not coordination.leads or time.monotonic() >= leave_by):
                return ExitCode.LEFT
            select.select([coordination.fd, notices.fd], [], [], None if leave_by is None else _LOOK)
            notices.drain()
    finally:
        coordination.stop()
        events.close()
        job_over.set()


def watch_queue(
    job: str | None, controller: Controller, over: threading.Event, interval: float = _QUEUE_INTERVAL
) -> None:
    """Set an event when a job, if any, neither waits nor runs; return when another thread has set it."""
    # While Slurm gives no answer, the job is not over.
    while job is not None and not over.wait(interval):
        if controller.is_queued(job) is False:
            over.set()


def _end(event: LeaderEvent | RecordsLost, records: Records) -> ExitCode | None:
    match event:
        case Ended(outcome=Outcome.SUCCEEDED | Outcome.CLOSED):
            return ExitCode.FINISHED
        case Ended(failure=failure) if failure is not None:
            logger.error("%s", root_cause(failure))
            return ExitCode.FAILED
        case Ended(outcome=outcome, detail=detail):
            logger.error("the run ended: %s", detail or outcome.value)
            return ExitCode.LEFT if records.last_round() is not None else ExitCode.FAILED
        case LeaderLost(why) | RecordsLost(why):
            logger.error("this coordinator ends: %s", why)
            return ExitCode.LEFT
        case Unreachable(why, usage):
            logger.error("this coordinator ends: %s", why)
            return ExitCode.USAGE if usage else ExitCode.LEFT
        case _:
            return None
