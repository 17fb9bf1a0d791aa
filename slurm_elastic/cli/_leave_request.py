"""What ``drain`` and ``requeue`` share: find the run, ask its leader."""

from __future__ import annotations

import getpass
import re
from typing import TYPE_CHECKING

from slurm_elastic.agent.option_values import base_directory
from slurm_elastic.errors import UsageError
from slurm_elastic.rundir import RunDir

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.leave_requests import LeaveAnswer

__all__ = ["find_run", "request_leave"]


def find_run(run_id: str, directory: str | None) -> RunDir:
    """Return the directory of a run that is not finished.

    Raises:
        UsageError: there is no such run, or it is finished.
    """
    run_dir = RunDir.for_run(base_directory(directory, None), run_id)
    if not run_dir.path.is_dir():
        raise UsageError(f"no run {run_id} in {run_dir.path.parent}; go where sbatch was called, or give --run-dir")
    if run_dir.is_done():
        raise UsageError(f"run {run_id} is finished")
    return run_dir


def request_leave(run_dir: RunDir, nodes: tuple[str, ...], reason: str) -> LeaveAnswer:
    """Ask the leader to make the agents on these nodes leave, all if none are named.

    Raises:
        UsageError: nobody leads the run, so that nobody trains.
    """
    # These import msgspec.
    from slurm_elastic.rendezvous.leader.fenced_records import newest_endpoint
    from slurm_elastic.rendezvous.leave_client import VisitError, ask, visitor_name
    from slurm_elastic.rendezvous.leave_requests import LeaveRequest
    from slurm_elastic.rendezvous.membership import LeaveReason
    from slurm_elastic.rendezvous.records.api import RunDirRecords

    secret = run_dir.secret()
    request = LeaveRequest(
        agent=visitor_name(),
        nodes=nodes,
        job="",
        reason=LeaveReason(reason),
        seconds=None,
        detail=f"{reason} by {getpass.getuser()}",
    )
    problem = "no leader has ever been there"
    for scope in sorted(run_dir.scopes(), key=_order, reverse=True):
        endpoint = newest_endpoint(RunDirRecords(run_dir, scope).situation(), scope)
        if endpoint is None or "address" not in endpoint:
            continue
        try:
            return ask(str(endpoint["address"]), int(endpoint["port"]), scope, secret, request)
        except VisitError as error:
            problem = str(error)
            break
    raise UsageError(f"run {run_dir.run_id} is not running: {problem}")


def _order(scope: str) -> tuple[str, int]:
    """Incarnations by their number: ``7.10`` after ``7.9``."""
    match = re.fullmatch(r"(.*)\.([0-9]+)", scope)
    return (match[1], int(match[2])) if match else (scope, -1)
