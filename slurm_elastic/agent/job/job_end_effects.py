"""Executes the decisions of :mod:`slurm_elastic.agent.job.job_end`: asks Slurm and the run's records, and ends jobs.

An agent may end because its file system has failed, so every question has a time-out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_elastic.agent.console_log import notice
from slurm_elastic.agent.job.job_end import is_without_script, other_agents
from slurm_elastic.agent.job.requeue import requeue_job
from slurm_elastic.agent.lifecycle.states import Done
from slurm_elastic.agent.option_values import JOB_END_VARIABLE, OptionValues
from slurm_elastic.errors import ExitCode, RecordsError
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.leader.fenced_records import last_round
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rendezvous.transport.messages import Successor
from slurm_elastic.rundir import RecordError, RunContents, RunDirError, failure_of, run_start, runs_of_job
from slurm_elastic.slurm import Controller, NodeState, SlurmJob

logger = logging.getLogger("slurm_elastic")

_T = TypeVar("_T")

_HELD = "JobHoldMaxRequeue"
"""Slurm requeues a job whose nodes failed, but the fifth time it holds it (MaxBatchRequeue in slurm.conf(5);
job_mgr.c before 23.02). Only an operator of Slurm can release it, while its owner can cancel it."""
_CONNECT_TIMEOUT = 2.0
_POLL_INTERVAL = 5.0
_POLLS = 120
"""Number of polls: ten minutes, twice Slurm's own default of SlurmdTimeout."""
_POLLS_BEFORE_REQUEUE = 6
"""Number of polls for the node of the batch script before an agent requeues its job."""
_RECORDS_WAIT = 30.0
"""Seconds that an agent waits at its end for records that hang."""
_SLURMCTLD_WAIT = 30.0
"""Seconds that an agent waits at its end for a slurmctld that does not answer."""


@dataclass(frozen=True)
class JobAtEnd:
    """One agent's job, when the agent has ended.

    Attributes:
        told: The members that the leader has named to this agent.
        signal_fd: Readable after a signal, which tells that Slurm is ending the job already.
    """

    job: SlurmJob
    rendezvous: RendezvousConfig
    values: OptionValues
    told: Sequence[Successor]
    signal_fd: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    controller: Controller = field(default_factory=Controller)
    say: Callable[[str], None] = notice

    def carry_out(self, outcome: Done, *, diagnoses: bool, leads: bool, shares_run: bool, represents_job: bool) -> None:
        """Execute what an agent still does for its job when it has ended.

        `diagnoses`: it is the one of its job that has asked Slurm why the job has to end.
        """
        if outcome.exit_code is ExitCode.LEFT and diagnoses:
            if not self._requeue() and not self._other_run_goes_on():
                self.end_abandoned_job(self._others(spares_count=True))
        elif outcome.gave_up:
            # On a full disk all agents give up, one after the other; in a network partition others may train on.
            if not self._other_run_goes_on():
                self.end_abandoned_job(self._others(spares_count=False))
        elif outcome.exit_code is not ExitCode.LEFT and (leads or represents_job):
            # The leader ends last.
            if outcome.exit_code is ExitCode.FINISHED and shares_run:
                self.cancel_held_elements()
            if leads and shares_run:
                _in_time(self._end_empty_jobs, otherwise=None)
            # The last agent of another run of the job ends it.
            if not self._other_run_goes_on():
                self.end_abandoned_job()

    def cancel_held_elements(self) -> None:
        """Cancel the elements of the job's array that Slurm holds; for the end of a run that is finished."""
        if self.job.array is None:
            return
        array = self.job.array.job_id
        for view in self.controller.elements(array):
            # Those that a person holds have another reason.
            if view.reason == _HELD:
                name = f"{array}_{view.array_task_id}"
                why = f"is held by Slurm ({_HELD}), as its nodes failed too often"
                self.say(f"job {name} {why}: the run is finished without it")
                self.controller.cancel(name)

    def end_abandoned_job(self, others: Sequence[tuple[str, Successor | None]] = ()) -> None:
        """End the job if its batch script is gone and none of these agents runs; the run's result is on record."""
        if self._batch_script_lost(_POLLS, self.signal_fd) and self._all_ended(others):
            name, first = self.job.name, self.job.job_nodes[0]
            self.say(f"job {name} has lost its batch script with {first}, and has no other agent: this agent ends it")
            self.controller.cancel(name)

    def _end_empty_jobs(self) -> None:
        base = self.rendezvous.run_dir.path.parent.parent
        for name in sorted(RunContents(self.rendezvous.run_dir).jobs() - {self.job.name}):
            view = self.controller.job(name)
            if view is not None and is_without_script(view) and len(runs_of_job(base, name)) <= 1:
                self.say(f"job {name} has lost its batch script with {view.batch_host}: cancelled, as the run is over")
                self.controller.cancel(name)

    def _requeue(self) -> bool:
        """Return True if the job will start again, or its batch script handles its end."""
        if JOB_END_VARIABLE in self.environ and not self._batch_script_lost(_POLLS_BEFORE_REQUEUE):
            return True
        try:
            if requeue_job(
                self.rendezvous.run_dir,
                self.job,
                ExitCode.LEFT,
                controller=self.controller,
                values=self.values,
                failed=False,
                say=self.say,
                others_go_on=True,
                wait=_SLURMCTLD_WAIT,
            ):
                return True
        except RunDirError as error:
            logger.warning("not requeued: %s", error)
        return not self._batch_script_lost(_POLLS_BEFORE_REQUEUE)

    def _other_run_goes_on(self) -> bool:
        """Return True if another step of this start of the job has a run that has neither finished nor failed."""

        def look() -> bool:
            restarts = self.job.restart_count
            with contextlib.suppress(RunDirError, RecordError):
                for run_dir in runs_of_job(self.rendezvous.run_dir.path.parent.parent, self.job.name):
                    if run_dir.run_id == self.rendezvous.run_dir.run_id or run_start(run_dir, restarts) is None:
                        continue
                    if not run_dir.is_done() and failure_of(run_dir, restarts) is None:
                        return True
            return False

        return _in_time(look, otherwise=False)

    def _others(self, *, spares_count: bool) -> list[tuple[str, Successor | None]]:
        """Return the other agents of the job that may run, with each of its nodes if `spares_count`."""
        members = _in_time(self._members, otherwise=None)
        known = self.told if members is None else members
        return other_agents(self.job, self.rendezvous.agent, known, all_nodes=spares_count or members is None)

    def _members(self) -> Sequence[Successor] | None:
        try:
            last = last_round(self.rendezvous.records.situation(), self.rendezvous.incarnation)
        except (RecordsError, LookupError, ValueError, TypeError):
            return None
        return last.successors or None if last is not None else None

    def _all_ended(self, others: Sequence[tuple[str, Successor | None]]) -> bool:
        """Return True if all these agents have ended; False if one lives, or if that is unknown after ten minutes."""

        def look() -> bool | None:
            states = self.controller.node_states([node for node, _ in others]) if others else {}
            up = [successor for node, successor in others if states[node] is not NodeState.DOWN]
            # One agent that has not ended is enough.
            answers = (_answers(agent.address, agent.port) if agent is not None else None for agent in up)
            return next((state for state in answers if state is not False), False)

        return _poll(look, _POLLS, self.signal_fd) is False

    def _batch_script_lost(self, polls: int, signal_fd: int | None = None) -> bool:
        """Return True if the job goes on without its batch script, so that its agents requeue or end it.

        srun tells its tasks its address (SLURM_SRUN_COMM_HOST, SLURM_SRUN_COMM_PORT). While it listens there it ends
        with the last task, and the batch script after it. If it refuses the connection, it has ended; if there is no
        answer, Slurm is asked for the state of the node. False if nothing is known after as many polls.
        """
        job, first = self.job, self.job.job_nodes[0]
        if job.step_id is None or job.node == first or "SLURM_SRUN_COMM_HOST" not in self.environ:
            # This agent ends with the script's node, or was not started by srun.
            return False

        def look() -> bool | None:
            host, port = self.environ["SLURM_SRUN_COMM_HOST"], self.environ.get("SLURM_SRUN_COMM_PORT", "")
            alive = _answers(host, int(port)) if host and port.isdigit() else None
            if alive is None and self.controller.node_states((first,))[first] is NodeState.DOWN:
                return False
            # Where scontrol is not available, as in a container, no more will be known.
            return True if alive is None and self.controller.is_silent else alive

        return _poll(look, polls, signal_fd) is False


def _poll(look: Callable[[], bool | None], polls: int, signal_fd: int | None) -> bool | None:
    """Look every five seconds until something is known; None if nothing is, or the descriptor is readable before."""
    for _ in range(polls):
        if (found := look()) is not None:
            return found
        if select.select([] if signal_fd is None else [signal_fd], [], [], _POLL_INTERVAL)[0]:
            break
    return None


def is_known_done(records: Records) -> bool:
    """Return True if the run is on record as finished; False if the records do not say so, or hang."""

    def look() -> bool:
        try:
            return records.is_done()
        except RecordsError as error:
            logger.debug("%s", error)
            return False

    return _in_time(look, otherwise=False)


def _in_time(call: Callable[[], _T], otherwise: _T) -> _T:
    """Return the result of a function, which must not raise, or `otherwise` if it takes longer than 30 s.

    The function runs in a daemon thread, so that the process can end meanwhile.
    """
    answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(call()), name="slurm-elastic-asking", daemon=True).start()
    try:
        return answers.get(timeout=_RECORDS_WAIT)
    except queue.Empty:
        return otherwise


def _answers(host: str, port: int) -> bool | None:
    """Return True if a process listens at this address; None if that is unknown."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
