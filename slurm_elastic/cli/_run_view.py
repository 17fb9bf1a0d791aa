"""Functions that the commands about a run share: find it, read it, ask Slurm and its leader, print it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import getpass
import itertools
import logging
import os
import shutil
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
from slurm_elastic.finding import Finding
from slurm_elastic.observe.find import find_run, newest_run
from slurm_elastic.observe.records import RunRecords, read_records
from slurm_elastic.observe.status import jobs_of, run_status
from slurm_elastic.observe.views import LiveRun, RunState, RunStatus, live_run
from slurm_elastic.rundir import RunContents, RunDir, RunDirError
from slurm_elastic.slurm import Controller, QueuedJob
from slurm_elastic.text import local_time, printable

if TYPE_CHECKING:
    from slurm_elastic.rendezvous.transport.messages import LeaveAnswer


COLOURS = {
    RunState.RUNNING: ("green", 32),
    RunState.WAITING: ("yellow", 33),
    RunState.FINISHED: ("cyan", 36),
    RunState.FAILED: ("red", 31),
    RunState.STOPPED: ("magenta", 35),
}
"""By their names, and by their numbers on a terminal (ECMA-48, SGR)."""
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
    """Add the arguments that name the run.

    Args:
        or_newest: True if the newest run counts where none is named.
    """
    newest = " (default: the newest run)" if or_newest else ""
    parser.add_argument(
        "run_id",
        metavar="RUN",
        nargs="?" if or_newest else None,
        help=f"id of the run or the beginning of it, the id of one of its jobs, or the path of its directory{newest}",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="as for the agent (default: the current directory)")


def open_run(options: argparse.Namespace, queue: Queue, *, exact: bool = False) -> RunDir:
    """Return the directory of the run that the command line names.

    Args:
        options: The parsed command line, with the arguments of `add_run`; gets the id of the newest run if it has none.
        exact: True if the beginning of an id is not enough.

    Raises:
        UsageError: There is no such run, there are several, or the run belongs to another user.
    """
    base = Path(options.run_dir) if options.run_dir is not None else None
    if options.run_id is None:
        run_dir = newest_run(base or Path.cwd())
        options.run_id = run_dir.run_id
        return run_dir
    return find_run(base, options.run_id, queue.directory, exact=exact)


def present_status(run_dir: RunDir, queue: Queue, *, live: bool = False) -> RunStatus:
    """Read a run, ask Slurm and the leader about it unless it is finished, and return its state.

    Args:
        live: True to have the leader ask all agents; False to see only whether it can be reached.
    """
    records = read_records(RunContents(run_dir), run_dir.run_id)
    answers = _leader_answers(records) if records.done is None else None
    answer, problems = _ask_all(run_dir) if live and answers else (None, ())
    if answer is not None:
        # Agents may take seconds for their answers, in which another round follows, or the run ends.
        records = read_records(RunContents(run_dir), run_dir.run_id)
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
    """Return the directory of the run that the command line names.

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
        nodes: Slurm's names of the nodes; empty for all nodes of the run.

    Raises:
        UsageError: No leader answers, so that the run does not train.
    """
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


class Terminal:
    """Writes to stdout, with colours if that is a terminal that shows them."""

    def __init__(self) -> None:
        # https://no-color.org
        self._colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def bold(self, text: str) -> str:
        """Return text in bold where there are colours."""
        return self._rendered("1", text)

    def state(self, state: RunState, width: int = 0) -> str:
        """Return the name of a state in its colour, filled up to a width."""
        return self._rendered(f"1;{COLOURS[state][1]}", state.value.ljust(width))

    def faint(self, text: str) -> str:
        """Return text that stands back where there are colours."""
        return self._rendered("2", text)

    def red(self, text: str) -> str:
        """Return text in red where there are colours."""
        return self._rendered("31", text)

    def write(self, line: str = "") -> None:
        """Write a line."""
        print(line)

    def _rendered(self, rendition: str, text: str) -> str:
        """Return text in a rendition (ECMA-48, SGR) where there are colours."""
        return f"\x1b[{rendition}m{text}\x1b[0m" if self._colours else text


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of text as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def problems_to_stderr(problems: Iterable[str]) -> None:
    """Print a line on stderr for each thing that could not be read."""
    for problem in problems:
        print(f"slurm-elastic: warning: {printable(problem)}", file=sys.stderr, flush=True)


def ago(seconds: float) -> str:
    """Return a duration in a few characters."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def clock(seconds: float, now: float) -> str:
    """Return a time in the zone of this machine, with its date if it is not of today."""
    when, today = (local_time(moment) for moment in (seconds, now))
    return when.strftime("%H:%M:%S" if when.date() == today.date() else "%Y-%m-%d %H:%M:%S")


def rank_list(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ``0-7,16-23``."""
    ascending = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = ([number for _, number in span] for _, span in ascending)
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


_MARK_COLOURS = {"ok": "green", "unknown": "yellow", "limit": "yellow", "broken": "bold red"}

_WIDE = 80
"""Columns below which a table has no room for sentences side by side."""


def show_findings(findings: Sequence[Finding], terminal: Terminal) -> None:
    """Print a table on a terminal that is wide enough, else a few lines for each finding."""
    wide = shutil.get_terminal_size().columns >= _WIDE
    if wide and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _show_table(findings)
        return
    for finding in findings:
        terminal.write(f"{finding.level.value:<8}{finding.check}{_where(finding, ' [', ']')}: {_fit(finding.found)}")
        for name, text in (("why", finding.why), ("fix", finding.fix)):
            if text:
                terminal.write(f"        {name}: {_fit(text)}")


def _show_table(findings: Sequence[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    for name in ("found", "why it matters", "fix"):
        table.add_column(name, ratio=1, overflow="fold")
    for finding in findings:
        check = Text(f"{finding.check}{_where(finding, chr(10), '')}", style="")
        title = Text(f"{finding.level.value} ", style=_MARK_COLOURS[finding.level.value]) + check
        table.add_row(title, *(Text(_fit(text)) for text in (finding.found, finding.why, finding.fix)))
    Console(highlight=False).print(table)


def _where(finding: Finding, before: str, after: str) -> str:
    """Return the nodes, or the place in the script, that a finding is about."""
    from slurm_elastic.slurm import compress

    text = compress(finding.nodes) if finding.nodes else printable(finding.place, 200)
    return f"{before}{text}{after}" if text else ""


def _fit(text: str) -> str:
    return printable(text, 1000)
