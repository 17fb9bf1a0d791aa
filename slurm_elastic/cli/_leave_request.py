"""Functions that ``drain`` and ``requeue`` share: find the run, and ask its leader to make agents leave."""

from __future__ import annotations

import argparse
import getpass
from typing import TYPE_CHECKING

from slurm_elastic.agent.option_values import base_directory
from slurm_elastic.cli._command import Parser
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.leave_requests import LeaveAnswer

__all__ = ["add_run", "find_run", "request_leave"]


def add_run(parser: Parser) -> None:
    """Add the arguments that name the run."""
    parser.add_argument("run_id", metavar="RUN", help="id of the run: id of the job, id of the array, or its --run-id")
    parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")


def find_run(options: argparse.Namespace) -> RunDir:
    """Return the directory of the run that the command line names.

    Args:
        options: The parsed command line, with the arguments of `add_run`.

    Raises:
        UsageError: There is no such run, or it is finished.
    """
    run_dir = RunDir.for_run(base_directory(options.run_dir, None), options.run_id)
    if not run_dir.path.is_dir():
        raise UsageError(
            f"no run {options.run_id} in {run_dir.path.parent}; change to the directory in which sbatch was called, or "
            "give --run-dir"
        )
    if run_dir.is_done():
        raise UsageError(f"run {options.run_id} is finished")
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
    from slurm_elastic.rendezvous.leave_requests import LeaveRequest
    from slurm_elastic.rendezvous.membership import LeaveReason

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
