"""A job whose batch script is gone with the first node: its last agent ends it.

Slurm lets such a job run on, and with its last task gone it still does, with nothing in it.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.leave_requests import job_of
from slurm_elastic.rendezvous.transport.messages import Placed
from slurm_elastic.slurm import Context, Controller, NodeState, SlurmJob, expand

__all__ = ["end_abandoned_job", "end_job_given_up", "has_lost_batch_script", "stands_for_job"]

_CONNECT_TIMEOUT = 2.0
_AGAIN = 5.0
_TURNS = 120
"""How often to ask: ten minutes, twice Slurm's own default of SlurmdTimeout."""


def stands_for_job(job: SlurmJob, agent: str, placed: Placed | None) -> bool:
    """Whether this agent sees to the end of its job, since the run was led from another one.

    Else the leader does, which goes last. One agent of each job is enough: the first in the last round.

    Args:
        job: of this agent.
        agent: its identity.
        placed: its last place, None if it never had one.
    """
    if placed is None or job_of(placed.leader) == job_of(agent):
        return False
    members = set(expand(placed.members))
    return next((node for node in job.job_nodes if node in members), "") == job.node


def end_abandoned_job(
    job: SlurmJob,
    environ: Mapping[str, str],
    controller: Controller,
    signalled: int,
    say: Callable[[str], None],
) -> None:
    """End the job if nobody else will; to be called by one of its agents, the last if possible, when the run has ended.

    What became of the run is on record; Slurm will call the job cancelled.

    Args:
        job: of this agent.
        environ: of this agent.
        controller: to ask.
        signalled: a descriptor that is readable once a signal came: then Slurm ends the job by itself.
        say: takes one line for people.
    """
    if has_lost_batch_script(job, environ, controller, _TURNS, signalled):
        say(f"the batch script of job {job.name} is gone with {job.job_nodes[0]}: this agent ends the job")
        controller.cancel(job.name)


def end_job_given_up(
    job: SlurmJob,
    agent: str,
    members: Sequence[Successor] | None,
    told: Sequence[Successor],
    environ: Mapping[str, str],
    controller: Controller,
    signalled: int,
    say: Callable[[str], None],
) -> None:
    """End the job if this agent has given up or left the run, as the last one of the job, and nobody else will.

    Whoever gives up does so by itself: on a full disk all do, one after the other; in a partition others may train on.
    Of those that leave a job which is not started again, the one sees to it that would have requeued it.

    Args:
        job: of this agent.
        agent: its identity. Nobody listens where it did.
        members: of the newest round on record, None if that cannot be read.
        told: the members that this agent was told of. They count where nothing can be read, and then each other node
            of the job has to be accounted for.
        environ, controller, signalled, say: see :func:`end_abandoned_job`.
    """
    if members is None:
        known, nodes = _of_job(told, agent), job.job_nodes
    else:
        known = _of_job(members, agent)
        nodes = tuple(known)
    # One that is known to live says enough, without a wait for those of which nobody knows.
    others = sorted((node for node in nodes if node != job.node), key=lambda node: node not in known)
    if has_lost_batch_script(job, environ, controller, _TURNS, signalled) and _have_ended(
        others, known, controller, signalled
    ):
        say(f"nobody else is left in job {job.name}, and its batch script is gone: this agent ends the job")
        controller.cancel(job.name)


def _of_job(members: Sequence[Successor], agent: str) -> dict[str, Successor]:
    return {each.agent.split("/")[0]: each for each in members if job_of(each.agent) == job_of(agent)}


def _have_ended(nodes: Collection[str], known: Mapping[str, Successor], controller: Controller, signalled: int) -> bool:
    """Whether the agents of all these nodes have ended; no if one lives, or if that is not known in time."""
    for _ in range(_TURNS):
        states = controller.node_states(nodes) if nodes else {}
        up = [node for node in nodes if states[node] is not NodeState.DOWN]
        # The first that is not known to have ended says enough.
        answers = (_answers(known[node].address, known[node].port) if node in known else None for node in up)
        answer = next((each for each in answers if each is not False), False)
        if answer is not None:
            return not answer
        if select.select([signalled], [], [], _AGAIN)[0]:
            return False
    return False


def has_lost_batch_script(
    job: SlurmJob, environ: Mapping[str, str], controller: Controller, turns: int, signalled: int | None = None
) -> bool:
    """Whether the job goes on without its batch script, and is requeued or ended by its agents or not at all.

    srun tells its tasks where it listens (SLURM_SRUN_COMM_HOST, SLURM_SRUN_COMM_PORT). As long as it does, it ends with
    the last task, and the batch script after it. If nobody listens there, it has ended; if there is no answer at all,
    Slurm is asked for the node until it knows.

    Args:
        job: of this agent.
        environ: of this agent.
        controller: to ask.
        turns: how often to look, every five seconds, while nobody knows; then the answer is no.
        signalled: a descriptor that is readable once a signal came: then nobody waits any more. None for none.
    """
    if job.context is not Context.STEP or job.node == job.job_nodes[0] or "SLURM_SRUN_COMM_HOST" not in environ:
        return False
    for _ in range(turns):
        alive = _listens(environ)
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


def _listens(environ: Mapping[str, str]) -> bool | None:
    """Whether this step's srun is there; None if nobody can tell."""
    host, port = environ.get("SLURM_SRUN_COMM_HOST"), environ.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdigit():
        return None
    return _answers(host, int(port))


def _answers(host: str, port: int) -> bool | None:
    """Whether somebody listens there; None if nobody can tell."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
