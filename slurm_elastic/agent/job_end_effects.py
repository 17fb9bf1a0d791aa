"""The effects of :mod:`slurm_elastic.agent.job_end`: what is asked of Slurm and of the run's records, and done.

An agent that ends may lack its file system, so nothing that it asks may hold it up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from slurm_elastic.agent.job_end import (
    JOB_END_VARIABLE,
    AgentEnd,
    CancelHeldElements,
    EndAbandonedJob,
    EndJobIfLast,
    RequeueJob,
    can_lose_batch_script,
    decide_job_end,
    held_elements,
    other_agents,
)
from slurm_elastic.agent.option_values import RequeuePolicy
from slurm_elastic.agent.requeue import requeue_job
from slurm_elastic.errors import ExitCode
from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.leader.fenced_records import last_round
from slurm_elastic.rendezvous.records.api import Records, RecordsError
from slurm_elastic.rundir import RunDir, RunDirError
from slurm_elastic.slurm import Controller, NodeState, SlurmJob

__all__ = ["JobAtEnd", "cancel_held_elements", "end_abandoned_job", "end_job_if_last", "is_known_done"]

logger = logging.getLogger("slurm_elastic")

_T = TypeVar("_T")

_CONNECT_TIMEOUT = 2.0
_AGAIN = 5.0
_TURNS = 120
"""How often to ask: ten minutes, twice Slurm's own default of SlurmdTimeout."""
_LAST_TURNS = 6
"""How often an agent that requeues its job looks whether the node of the batch script is there."""
_RECORDS_WAIT = 30.0
"""Seconds that an agent which ends waits for records that hang."""
_SLURMCTLD_WAIT = 30.0
"""Seconds that an agent whose part is over waits for a slurmctld that does not answer."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class JobAtEnd:
    """One agent's job, when the agent has ended.

    Attributes:
        job: the Slurm job this agent runs in.
        agent: its identity.
        run_dir: of the run.
        records: of the run.
        incarnation: whose rounds count.
        policy: the user's wishes.
        told: the members that this agent was told of.
        signalled: a descriptor that is readable once a signal came: then Slurm ends the job by itself.
        environ: of this agent.
        controller: to ask.
        say: takes one line for people.
    """

    job: SlurmJob
    agent: str
    run_dir: RunDir
    records: Records
    incarnation: str
    policy: RequeuePolicy
    told: Sequence[Successor]
    signalled: int
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    controller: Controller = dataclasses.field(default_factory=Controller)
    say: Say = logger.info

    def carry_out(self, end: AgentEnd) -> None:
        """Do for the job what is left to do."""
        for action in decide_job_end(end):
            match action:
                case RequeueJob():
                    if not self._requeue():
                        self._end_if_last(spares_count=True)
                case EndJobIfLast(spares_count):
                    self._end_if_last(spares_count=spares_count)
                case CancelHeldElements():
                    cancel_held_elements(self.job, self.controller, self.say)
                case EndAbandonedJob():
                    end_abandoned_job(self.job, self.environ, self.controller, self.signalled, self.say)

    def _requeue(self) -> bool:
        """Return True if the job will start again, or its batch script sees to its end."""
        if JOB_END_VARIABLE in self.environ and not self._batch_script_lost():
            return True
        try:
            if requeue_job(
                self.run_dir,
                self.job,
                ExitCode.LEFT,
                controller=self.controller,
                policy=self.policy,
                failed=False,
                say=self.say,
                others_go_on=True,
                wait=_SLURMCTLD_WAIT,
            ):
                return True
        except RunDirError as error:
            logger.warning("not requeued: %s", error)
        return not self._batch_script_lost()

    def _batch_script_lost(self) -> bool:
        return batch_script_lost(self.job, self.environ, self.controller, _LAST_TURNS)

    def _end_if_last(self, *, spares_count: bool) -> None:
        found = _within(_RECORDS_WAIT, self._members, otherwise=None)
        members, told = (None, found) if spares_count and found is not None else (found, self.told)
        end_job_if_last(self.job, self.agent, members, told, self.environ, self.controller, self.signalled, self.say)

    def _members(self) -> Sequence[Successor] | None:
        """The members of the newest round on record; None if that cannot be read."""
        try:
            last = last_round(self.records.situation(), self.incarnation)
        except (RecordsError, LookupError, ValueError, TypeError):
            return None
        return last.successors or None if last is not None else None


def is_known_done(records: Records) -> bool:
    """Return True if the run is on record as finished; False if the records do not say so, or hang."""

    def look() -> bool:
        try:
            return records.is_done()
        except RecordsError as error:
            logger.debug("%s", error)
            return False

    return _within(_RECORDS_WAIT, look, otherwise=False)


def _within(seconds: float, call: Callable[[], _T], otherwise: _T) -> _T:
    """Return what a call returns, which must not raise, or `otherwise` if it takes longer than so many seconds.

    It goes on in a thread that does not hold up the end of the process.
    """
    answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(call()), name="slurm-elastic-asking", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return otherwise


# The end of the job.


def cancel_held_elements(job: SlurmJob, controller: Controller, say: Say) -> None:
    """Cancel the elements of the job's array that Slurm holds; for the end of a run that is finished.

    Args:
        job: the Slurm job this agent runs in.
        controller: to ask.
        say: takes one line for people.
    """
    if job.array is None:
        return
    array = job.array.job_id
    for name in held_elements(controller.elements(array), array):
        say(
            f"job {name} is held by Slurm (JobHoldMaxRequeue), as its nodes failed too often: "
            "the run is finished without it"
        )
        controller.cancel(name)


def end_abandoned_job(
    job: SlurmJob, environ: Mapping[str, str], controller: Controller, signalled: int, say: Say
) -> None:
    """End the job if its batch script is gone; called by its last agent when the run has ended.

    The result of the run is on record; Slurm will call the job cancelled.

    Args:
        job, environ, controller, signalled, say: see :class:`JobAtEnd`.
    """
    if batch_script_lost(job, environ, controller, _TURNS, signalled):
        say(f"the batch script of job {job.name} is gone with {job.job_nodes[0]}: this agent ends the job")
        controller.cancel(job.name)


def end_job_if_last(
    job: SlurmJob,
    agent: str,
    members: Sequence[Successor] | None,
    told: Sequence[Successor],
    environ: Mapping[str, str],
    controller: Controller,
    signalled: int,
    say: Say,
) -> None:
    """End the job if its batch script is gone and no other agent of it runs.

    Args:
        members, told: see :func:`~slurm_elastic.agent.job_end.other_agents`.
        job, agent, environ, controller, signalled, say: see :class:`JobAtEnd`.
    """
    others = other_agents(job, agent, members, told)
    if batch_script_lost(job, environ, controller, _TURNS, signalled) and _have_ended(others, controller, signalled):
        say(f"job {job.name} has no other agent left, and its batch script is gone: this agent ends the job")
        controller.cancel(job.name)


def _have_ended(others: Sequence[tuple[str, Successor | None]], controller: Controller, signalled: int) -> bool:
    """Return True if all these agents have ended; False if one lives, or if that is not known in time."""
    for _ in range(_TURNS):
        states = controller.node_states([node for node, _ in others]) if others else {}
        up = [known for node, known in others if states[node] is not NodeState.DOWN]
        # The first that is not known to have ended says enough.
        answers = (_answers(known.address, known.port) if known is not None else None for known in up)
        answer = next((each for each in answers if each is not False), False)
        if answer is not None:
            return not answer
        if select.select([signalled], [], [], _AGAIN)[0]:
            return False
    return False


def batch_script_lost(
    job: SlurmJob, environ: Mapping[str, str], controller: Controller, turns: int, signalled: int | None = None
) -> bool:
    """Return True if the job goes on without its batch script, so that its agents requeue or end it.

    srun tells its tasks where it listens (SLURM_SRUN_COMM_HOST, SLURM_SRUN_COMM_PORT). As long as it does, it ends with
    the last task, and the batch script after it. If the connection is refused, srun has ended; if there is no answer
    at all, Slurm is asked for the node until it knows.

    Args:
        job: the Slurm job this agent runs in.
        environ: of this agent.
        controller: to ask.
        turns: how often to look, every five seconds, while nothing is known; then the result is False.
        signalled: a descriptor that ends the wait when it is readable; None for none.
    """
    if not can_lose_batch_script(job, environ):
        return False
    for _ in range(turns):
        alive = _srun_listens(environ)
        if alive is None:
            state = controller.node_states((job.job_nodes[0],))[job.job_nodes[0]]
            alive = False if state is NodeState.DOWN else None
            if alive is None and controller.is_silent:
                # As in a container: nothing will ever be known.
                return False
        if alive is not None:
            return not alive
        with contextlib.suppress(OSError):
            if select.select([] if signalled is None else [signalled], [], [], _AGAIN)[0]:
                return False
    return False


def _srun_listens(environ: Mapping[str, str]) -> bool | None:
    """Return True if this step's srun is there; None if that cannot be told."""
    host, port = environ.get("SLURM_SRUN_COMM_HOST"), environ.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdigit():
        return None
    return _answers(host, int(port))


def _answers(host: str, port: int) -> bool | None:
    """Return True if a process listens there; None if that cannot be told."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
