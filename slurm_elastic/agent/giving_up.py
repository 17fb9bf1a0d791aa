"""The end of an agent that gives up: nothing that it asks may keep it, as what it lacks may be a file system."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from slurm_elastic.agent.abandoned import end_job_given_up
from slurm_elastic.agent.settings import AgentSettings
from slurm_elastic.agent.signals import Notices
from slurm_elastic.rendezvous.connect import Seat
from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.leader.fenced_records import last_round
from slurm_elastic.rendezvous.records.api import Records, RecordsError
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.slurm import Controller

__all__ = ["end_given_up", "is_known_done"]

logger = logging.getLogger("slurm_elastic")

_T = TypeVar("_T")

_WAIT = 30.0
"""Seconds that an agent which ends waits for records that hang."""


def is_known_done(records: Records) -> bool:
    """Whether the run is on record as finished; no if the records do not say so, or hang."""

    def look() -> bool:
        try:
            return records.is_done()
        except RecordsError as error:
            logger.debug("%s", error)
            return False

    return _within(_WAIT, look, otherwise=False)


def end_given_up(
    settings: AgentSettings, seat: Seat, coordination: Coordination, notices: Notices, *, spares_go_on: bool = False
) -> None:
    """See :func:`~slurm_elastic.agent.abandoned.end_job_given_up`; to be called when the coordination has stopped.

    With `spares_go_on`, agents that are in no round may go on without this one, so each node of the job counts.
    """

    def look() -> Sequence[Successor] | None:
        try:
            last = last_round(seat.records.situation(), seat.incarnation)
        except (RecordsError, LookupError, ValueError, TypeError):
            return None
        return last.successors or None if last is not None else None

    if settings.job is not None:
        found, told = _within(_WAIT, look, otherwise=None), coordination.members_told()
        members, known = (None, found) if spares_go_on and found is not None else (found, told)
        controller = Controller()
        end_job_given_up(settings.job, settings.agent, members, known, os.environ, controller, notices.fd, logger.info)


def _within(seconds: float, call: Callable[[], _T], otherwise: _T) -> _T:
    """What a call returns, which must not raise, or `otherwise` if it takes longer than so many seconds.

    It goes on in a thread that does not hold up the end of the process.
    """
    answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(call()), name="slurm-elastic-asking", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return otherwise
