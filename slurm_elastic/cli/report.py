"""``slurm-elastic report``: says where the time of a run went, as a page, as JSON, or as a trace."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Queue, ViewCommand, add_run, open_run, present_status, problems_to_stderr
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.page import html_page
from slurm_elastic.observe.records import read_records
from slurm_elastic.observe.report import chrome_trace, report, report_json
from slurm_elastic.rundir import RunContents

__all__ = ["Report"]

_EXAMPLES = """\
  slurm-elastic report 1234                     write report-1234.html, which needs no network to open
  slurm-elastic report 1234 --json              the same for programs, on stdout
  slurm-elastic report 1234 --trace run.json    a trace that Perfetto opens (ui.perfetto.dev)
"""


class Report(ViewCommand):
    """Writes the report of a run."""

    name = "report"
    summary = "say where the time of a run went: rounds, causes, goodput"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_run(parser)
        parser.add_argument("--output", metavar="FILE", help="the page (default: report-<run>.html)")
        parser.add_argument("--json", action="store_true", help="JSON on stdout, with the schema in docs/events.md")
        parser.add_argument("--trace", metavar="FILE", help="a trace in Chrome's format")

    def show(self, arguments: Sequence[str]) -> int:
        """Write what is asked for."""
        options = self.parser().parse_args(arguments)
        if options.json and options.output:
            raise UsageError("--json writes to stdout, --output a page; give one of them")
        queue = Queue()
        run_dir = open_run(options, queue)
        status = present_status(run_dir, queue)
        found = report(read_records(RunContents(run_dir), run_dir.run_id), status, time.time())
        problems_to_stderr(status.problems)
        if not found.segments:
            raise UsageError(
                f"run {run_dir.run_id} has no records of progress: its agents have not started, or are of an earlier "
                "release; slurm-elastic status shows what is known"
            )
        if options.trace:
            _write(options.trace, json.dumps(chrome_trace(found)))
        if options.json:
            print(json.dumps(report_json(found), indent=1))
        elif options.output or not options.trace:
            _write(options.output or f"report-{run_dir.run_id}.html", html_page(found))
        return 0


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror}; name another file") from None
    # Not on stdout, which may have the JSON.
    print(f"slurm-elastic: wrote {name}", file=sys.stderr)
