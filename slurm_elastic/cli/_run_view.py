"""Functions that the commands about a run share: find it, read it, ask Slurm and its leader."""

from __future__ import annotations

import argparse
import contextlib
import functools
import getpass
import logging
import os
import signal
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.find import find_run, newest_run
from slurm_elastic.observe.records import RunRecords, read_records
from slurm_elastic.observe.status import jobs_of, run_status
from slurm_elastic.observe.views import LiveRun, RunStatus, live_run
from slurm_elastic.rundir import RunDir, RunDirError
from slurm_elastic.slurm import Controller, QueuedJob
from slurm_elastic.text import printable

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.transport.messages import LeaveAnswer


_CONNECT = 2.0
"""Seconds to wait for the leader's node."""


class ViewCommand(Command):
    """A command that shows a run. It ends quietly when its reader, such as ``head``, or its user has seen enough."""

    @abstractmethod
    def show(self, arguments: Sequence[str]) -> int:
        """Show what is asked for and return the exit code."""

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command."""
        return until_seen_enough(lambda: self.show(arguments))


def until_seen_enough(show: Callable[[], int]) -> int:
    """Show something until its reader, such as ``head``, or its user has seen enough; return the exit code."""
    # One line of ours says that Slurm does not answer or that a record is forged; squeue's own words are many.
    logging.disable(logging.WARNING)
    try:
        code = show()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # docs.python.org, signal, "Note on SIGPIPE": the interpreter flushes stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what the user has started as Ctrl-C does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Queue:
    """The jobs of this user in Slurm's queue, asked for once and only if they are needed."""

    @functools.cached_property
    def jobs(self) -> tuple[QueuedJob, ...] | None:
        """The jobs; None if Slurm does not answer."""
        return Controller().own_jobs()

    def directory(self, name: str) -> Path | None:
        """Return the directory from which a queued job or array of this user, ``12`` or ``12_3``, was submitted."""
        jobs = (job for job in self.jobs or () if name in (job.name, job.job_id, job.array_job_id))
        return next((Path(job.work_dir) for job in jobs), None)


def add_run(parser: Parser, *, or_newest: bool = False) -> None:
    """Add the arguments that name the run; with `or_newest` the newest one counts where none is named."""
    newest = " (default: the newest run)" if or_newest else ""
    parser.add_argument(
        "run_id",
        metavar="RUN",
        nargs="?" if or_newest else None,
        help=f"id of the run or the beginning of it, the id of one of its jobs, or the path of its directory{newest}",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")


def open_run(directory: str | None, run: str | None, queue: Queue) -> RunDir:
    """Return the directory of the run that the arguments of `add_run` name; of the newest one if they name none.

    Raises:
        UsageError: There is no such run, there are several, or the run belongs to another user.
    """
    base = None if directory is None else Path(directory)
    return newest_run(base or Path.cwd()) if run is None else find_run(base, run, queue.directory)


def present_status(run_dir: RunDir, queue: Queue, *, live: bool = False) -> RunStatus:
    """Read a run, ask Slurm and the leader about it unless it is finished, and return its state.

    With `live` the leader asks all agents, else it is only seen whether it can be reached.
    """
    records = read_records(run_dir)
    answers = _leader_answers(records) if records.done is None else None
    answer, problems = _ask_all(run_dir) if live and answers else (None, ())
    if answer is not None:
        # Agents may take seconds for their answers, in which another round follows, or the run ends.
        records = read_records(run_dir)
    if records.done is not None:
        return run_status(records, time.time())
    status = run_status(records, time.time(), queue.jobs, answers, answer)
    if queue.jobs is None and jobs_of(records):
        where = "the records" if answer is None else "the agents"
        unknown = f"Slurm does not answer here: what is in the queue is unknown, and the state is that of {where}"
        problems = (unknown, *problems)
    return replace(status, problems=(*status.problems, *problems))


def _ask_all(run_dir: RunDir) -> tuple[LiveRun | None, tuple[str, ...]]:
    """Return what the agents do now; None, and a line that says why, if no leader answers."""
    # It imports msgspec.
    from slurm_elastic.rendezvous.leader_client import NoAnswerError, ask_status, find_leader

    begin = time.monotonic()
    try:
        answer, reports = ask_status(find_leader(run_dir))
    except (NoAnswerError, RunDirError) as error:
        return None, (f"not live, but from the run directory: {error}",)
    return live_run(answer, reports, time.monotonic() - begin), ()


def _leader_answers(records: RunRecords) -> bool | None:
    """Return True if the port of the newest leader on record accepts connections; None if none is on record."""
    endpoint = records.endpoint
    if endpoint is None:
        return None
    try:
        with socket.create_connection((str(endpoint.get("address")), int(endpoint.get("port", 0))), _CONNECT):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def open_running(options: argparse.Namespace) -> RunDir:
    """Return the directory of the run that the command line names; raises UsageError if it does not run."""
    base = None if options.run_dir is None else Path(options.run_dir)
    run_dir = find_run(base, options.run_id, Queue().directory, exact=True)
    if run_dir.is_done():
        raise UsageError(f"run {run_dir.run_id} is finished")
    if not run_dir.path.is_dir():
        raise UsageError(f"run {run_dir.run_id} is not running: its job has not started yet")
    return run_dir


def request_leave(run_dir: RunDir, nodes: tuple[str, ...], reason: str) -> LeaveAnswer:
    """Ask the leader to make the agents on these nodes leave, or all; raises UsageError if no leader answers."""
    # These import msgspec.
    from slurm_elastic.rendezvous.leader_client import NoAnswerError, ask_to_leave, client_name, find_leader
    from slurm_elastic.rendezvous.membership.agents import LeaveReason
    from slurm_elastic.rendezvous.transport.messages import LeaveRequest

    detail = f"{reason} by {getpass.getuser()}"
    request = LeaveRequest(client_name(), nodes, job="", reason=LeaveReason(reason), seconds=None, detail=detail)
    try:
        return ask_to_leave(find_leader(run_dir), request)
    except NoAnswerError as error:
        raise UsageError(f"run {run_dir.run_id} is not running: {error}") from None


def problems_to_stderr(problems: Iterable[str]) -> None:
    """Print a line on stderr for each thing that could not be read."""
    for problem in problems:
        print(f"slurm-elastic: warning: {printable(problem)}", file=sys.stderr, flush=True)
