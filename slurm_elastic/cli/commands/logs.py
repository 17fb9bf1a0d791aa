"""``slurm-elastic logs``: prints what the workers of a run have written, merged by time."""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import time
from collections.abc import Iterator, Sequence

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Queue, ViewCommand, add_run, open_run, problems_to_stderr
from slurm_elastic.cli._terminal import BOLD, FAINT, RED, rank_list, styled
from slurm_elastic.errors import UsageError
from slurm_elastic.failures.causes import explanation, named
from slurm_elastic.observe.failures import RoundFailure, read_failures
from slurm_elastic.observe.log_lines import ALL, LogFilter, LogLine, LogReader
from slurm_elastic.observe.records import read_records
from slurm_elastic.observe.status import run_status
from slurm_elastic.observe.views import RunState
from slurm_elastic.rundir import RunContents, RunDir
from slurm_elastic.slurm import compress, expand
from slurm_elastic.text import local_time, printable

_PAUSE = 0.3
"""Seconds between two looks with --follow."""
_LOOK_AT_RUN = 2.0
"""Seconds between two looks whether the run is over."""
_WIDTH = 100_000
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?(s|m|min|h|d)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TODAY = re.compile(r"([0-9]{1,2})(:[0-9]{2}(?::[0-9]{2})?)")


class Logs(ViewCommand):
    """Prints the logs of all workers, or the failures of the run."""

    name = "logs"
    summary = "print what the workers of a run have written, merged by time"
    examples = """\
  slurm-elastic logs 1234 --follow
  slurm-elastic logs 1234 --rank 0 --round last
  slurm-elastic logs 1234 --node 'node[7-9]' --since 10min --grep 'NCCL|Error'
  slurm-elastic logs 1234 --errors
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser, or_newest=True)
        parser.add_argument("--rank", metavar="RANKS", help="only these ranks, such as 0,4-7")
        parser.add_argument("--node", metavar="NODES", help="only these nodes, such as node[1-3]")
        parser.add_argument("--round", metavar="ROUNDS", help="only these rounds, such as 0,2-4, or last")
        parser.add_argument("--since", metavar="TIME", help="only since 90s, 10min, 2h, 1d ago, or since 14:05")
        parser.add_argument("--grep", metavar="PATTERN", help="only lines that match this regular expression of Python")
        parser.add_argument("--follow", "-f", action="store_true", help="go on until the run is finished or has failed")
        parser.add_argument("--errors", action="store_true", help="each failure once: the root cause, what followed")

    def show(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        if options.errors and options.follow:
            raise UsageError("--errors shows failures that are over; leave out --follow")
        run_dir = open_run(options.run_dir, options.run_id, Queue())
        contents = RunContents(run_dir)
        if options.errors:
            return _errors(run_dir)
        log_filter = _wanted(options, contents)
        if not options.follow:
            _require_logs(contents, log_filter, options)
        return _lines(contents, run_dir, log_filter, options.follow)


def _lines(contents: RunContents, run_dir: RunDir, log_filter: LogFilter, follow: bool) -> int:
    reader = LogReader(contents, log_filter)
    look_at_run = 0.0
    while True:
        over = not follow
        if follow and time.monotonic() >= look_at_run:
            look_at_run = time.monotonic() + _LOOK_AT_RUN
            state = run_status(read_records(run_dir), time.time()).state
            over = state in (RunState.FINISHED, RunState.FAILED)
        for line in reader.lines(last=over):
            print(_shown(line))
        sys.stdout.flush()
        if over:
            break
        time.sleep(_PAUSE)
    problems_to_stderr(contents.problems)
    return 0


def _shown(line: LogLine) -> str:
    when = local_time(line.time).strftime("%H:%M:%S.%f")[:-3]
    who = f"[{line.log.node}/{line.log.rank}]"
    text = printable(line.text.replace("\t", "        "), _WIDTH)
    return f"{styled(when, FAINT)} {who} {styled(text, RED) if line.log.stream == 'stderr' else text}"


def _errors(run_dir: RunDir) -> int:
    records = read_records(run_dir)
    failures = read_failures(RunContents(run_dir), records)
    if not failures:
        print(f"no failures in run {run_dir.run_id}")
    for index, failure in enumerate(failures):
        if index:
            print()
        for line in _failure(failure):
            print(line)
    problems_to_stderr(records.problems)
    return 0


def _failure(failure: RoundFailure) -> Iterator[str]:
    times = "" if len(failure.rounds) == 1 else f", {len(failure.rounds)} times"
    rounds = rank_list(failure.rounds)
    root = failure.root
    yield styled(f"round {rounds}{times}: {printable(failure.reason)}", BOLD)
    if root.rank is not None:
        why = explanation(root.cause)
        yield f"root cause: rank {root.rank} on {root.node}{f': {why}' if why else ''}"
    for line in root.text.splitlines():
        yield f"  {styled(printable(line), RED)}"
    row = named(root.cause)
    if row is not None and row.advice:
        yield f"  what can help: {row.advice}"
    if root.log:
        yield f"  the rest: {printable(root.log, 4096)}"
    if failure.followed:
        yield "followed from it:"
    for error, ranks in failure.followed.items():
        yield f"  rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}: {printable(error)}"


def _wanted(options: argparse.Namespace, contents: RunContents) -> LogFilter:
    try:
        pattern = re.compile(options.grep or "")
    except re.error as error:
        raise UsageError(f"--grep {options.grep!r} is no regular expression: {error}") from None
    last = str(max(contents.log_rounds(), default=0)) if options.round == "last" else None
    return LogFilter(
        ranks=_numbers("--rank", options.rank, "0,4-7"),
        nodes=None if options.node is None else frozenset(expand(options.node)),
        rounds=_numbers("--round", last or options.round, "0,2-4 or last"),
        since=0.0 if options.since is None else _since(options.since, time.time()),
        pattern=pattern,
    )


def _numbers(option: str, text: str | None, example: str) -> Sequence[range]:
    if text is None:
        return ALL
    matches = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match]
    if len(ranges) < len(matches) or not all(ranges):
        raise UsageError(f"{option} {text!r} is no list of numbers; write it as in {example}")
    return ranges


def _since(text: str, now: float) -> float:
    if match := _AGO.fullmatch(text.strip()):
        return now - float(match[1]) * _UNITS[match[2]]
    # Python 3.10 reads neither a Z for UTC nor a fraction of another length than 3 or 6 digits.
    exact = re.sub(r"\.([0-9]{1,6})", lambda fraction: f".{fraction[1]:0<6}", text.replace("Z", "+00:00"))
    if match := _TODAY.fullmatch(text):
        exact = f"{local_time(now):%Y-%m-%d}T{match[1]:0>2}{match[2]}"
    try:
        return datetime.datetime.fromisoformat(exact).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text!r} is no time; write it as in 90s, 10min, 2h, 14:05 or 2026-01-31T14:05"
        ) from None


def _require_logs(contents: RunContents, log_filter: LogFilter, options: argparse.Namespace) -> None:
    """Raise UsageError if nothing can match the options."""
    logs = [log for number in contents.log_rounds() if log_filter.wants_round(number) for log in contents.logs(number)]
    if not logs:
        rounds = contents.log_rounds()
        have = f"rounds with logs: {rank_list(rounds)}" if rounds else "its workers have not started, or write none"
        which = "" if options.round is None or not rounds else f" of round {options.round}"
        raise UsageError(f"run {contents.path.name} has no logs{which}; {have}")
    if not any(log_filter.wants_log(log) for log in logs):
        ranks, nodes = {log.rank for log in logs}, {log.node for log in logs}
        raise UsageError(
            f"no logs of these ranks and nodes in run {contents.path.name}; it has ranks {rank_list(sorted(ranks))} on "
            f"{compress(sorted(nodes))}"
        )
