"""Functions that ``drain`` and ``requeue`` share: find the run, and ask its leader to make agents leave."""

from __future__ import annotations

import argparse
import getpass
from typing import TYPE_CHECKING

from slurm_elastic.cli._run_view import Queue, open_run
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.transport.messages import LeaveAnswer


def find_run(options: argparse.Namespace) -> RunDir:
    """Return the directory of the run that the command line names.

    Args:
        options: The parsed command line, with the arguments of `_run_view.add_run`.

    Raises:
        UsageError: There is no such run, it has not started, or it is finished.
    """
    run_dir = open_run(options, Queue(), exact=True)
    if run_dir.is_done():
        raise UsageError(f"run {run_dir.run_id} is finished")
    if not run_dir.path.is_dir():
        raise UsageError(f"run {run_dir.run_id} is not running: its job has not started yet")
    return run_dir


def request_leave(run_dir: RunDir, nodes: tuple[str, ...], reason: str) -> LeaveAnswer:
    """Ask the leader to make the agents on these nodes leave.

    Args:
        run_dir: Directory of a run that is not finished.
        nodes: Slurm's names of the nodes; empty for all nodes of the run.
        reason: Value of a LeaveReason.

    Raises:
        UsageError: No leader answers, so that the run does not train.
    """
    # These import msgspec.
    from slurm_elastic.rendezvous.leader_client import NoAnswerError, ask_to_leave, client_name, find_leader
    from slurm_elastic.rendezvous.membership.agents import LeaveReason
    from slurm_elastic.rendezvous.transport.messages import LeaveRequest

    request = LeaveRequest(
        agent=client_name(),
        nodes=nodes,
        job="",
        reason=LeaveReason(reason),
        seconds=None,
        detail=f"{reason} by {getpass.getuser()}",
    )
    try:
        return ask_to_leave(find_leader(run_dir), request)
    except NoAnswerError as error:
        raise UsageError(f"run {run_dir.run_id} is not running: {error}") from None
