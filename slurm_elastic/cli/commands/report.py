"""``slurm-elastic report``: says where the time of runs went, as a page, as JSON, or as a trace."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic._version import __version__
from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._run_view import Queue, ViewCommand, add_run, open_run, present_status, problems_to_stderr
from slurm_elastic.errors import UsageError
from slurm_elastic.observe.page import html_comparison, html_page
from slurm_elastic.observe.records import Event, RunRecords, read_records
from slurm_elastic.observe.report import Report as RunReport
from slurm_elastic.observe.report import chrome_trace, report, report_json
from slurm_elastic.rundir import RunDir
from slurm_elastic.text import printable

_NAMED = 4
"""Runs that the name of a page names."""
_RECEIVER = 30.0
"""Seconds for an answer of a receiver of events."""

_SEVERITIES = {"INFO": 9, "WARN": 13, "ERROR": 17}
_WARNINGS = frozenset({"node_lost", "node_check_failed", "worker_hung"})
_IN_RECORD = frozenset({"time", "event", "text", "schema"})
"""Fields that are no attributes of a record."""


class Report(ViewCommand):
    """Writes the report of a run, or of several side by side."""

    name = "report"
    summary = "say where the time of a run went: rounds, causes, goodput"
    examples = """\
  slurm-elastic report 1234                     write report-1234.html, which needs no network to open
  slurm-elastic report 1234 --json              the same for programs, on stdout
  slurm-elastic report 1234 --trace run.json    a trace that Perfetto opens (ui.perfetto.dev)
  slurm-elastic report 1234 --otlp http://collector:4318         its events as logs of OpenTelemetry
  slurm-elastic report 1234 1240 1251           the runs side by side, in report-1234-1240-1251.html
"""

    def add_options(self, parser: Parser) -> None:
        add_run(parser, or_newest=True)
        parser.add_argument("more", metavar="RUN", nargs="*", help="further runs, side by side with the first one")
        parser.add_argument("--output", metavar="FILE", help="the page (default: report-<runs>.html)")
        parser.add_argument("--json", action="store_true", help="JSON on stdout, with the schema in docs/events.md")
        parser.add_argument("--trace", metavar="FILE", help="a trace in Chrome's format")
        parser.add_argument(
            "--otlp", metavar="URL", help="send the events as logs to this receiver of OpenTelemetry, by OTLP/HTTP"
        )

    def show(self, arguments: Sequence[str]) -> int:
        options = self.parser().parse_args(arguments)
        if options.json and options.output:
            raise UsageError("--json writes to stdout, --output a page; give one of them")
        if options.trace and options.more:
            raise UsageError("--trace is of one run; name one")
        if options.otlp and not options.otlp.startswith(("http://", "https://")):
            raise UsageError(f"--otlp {options.otlp!r} is no URL; give one, such as http://collector:4318")
        queue = Queue()
        names = dict.fromkeys((options.run_id, *options.more))
        reports = [_read(open_run(options.run_dir, name, queue), queue) for name in names]
        if options.otlp:
            for item in reports:
                _send(options.otlp, item.records)
        if options.trace:
            write_file(options.trace, json.dumps(chrome_trace(reports[0])))
        if options.json:
            contents = [report_json(item) for item in reports]
            print(json.dumps(contents if options.more else contents[0], indent=1))
        elif options.output or not (options.trace or options.otlp):
            runs = "-".join(item.status.run for item in reports[:_NAMED])
            name = options.output or f"report-{runs}{'-and-more' if len(reports) > _NAMED else ''}.html"
            write_file(name, html_page(reports[0]) if len(reports) == 1 else html_comparison(reports))
        return 0


def _read(run_dir: RunDir, queue: Queue) -> RunReport:
    status = present_status(run_dir, queue)
    view = report(read_records(run_dir), status, time.time())
    problems_to_stderr(status.problems)
    if not view.segments:
        raise UsageError(
            f"run {run_dir.run_id} has no records of progress: its agents have not started, or are of an earlier "
            "release; slurm-elastic status shows what is known"
        )
    return view


def _send(url: str, records: RunRecords) -> None:
    import http.client
    import urllib.request

    headers = {"Content-Type": "application/json", **_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))}
    fix = "--otlp takes the base URL of an OTLP/HTTP receiver that takes JSON, such as http://collector:4318"
    count = 0
    for content in log_requests(records):
        try:
            body = json.dumps(content).encode()
            request = urllib.request.Request(f"{url.rstrip('/')}/v1/logs", data=body, headers=headers)
            with urllib.request.urlopen(request, timeout=_RECEIVER) as answer:
                said = answer.read(4096)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UsageError(f"{url} has not taken the events: {error}; {fix}") from None
        refused = _refused(said)
        if refused:
            raise UsageError(f"{url} has refused some of the events: {refused}; see the log of the receiver")
        count += len(content["resourceLogs"][0]["scopeLogs"][0]["logRecords"])
    print(f"slurm-elastic: sent {count} events of run {records.run_id}", file=sys.stderr)


def _headers(text: str) -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS, ``name=value,...`` with values as in a URL."""
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in pairs}


def _refused(answer: bytes) -> str:
    """Return why a receiver has not taken all records; empty if it has."""
    try:
        partial = typed_json.loads(answer)["partialSuccess"]
        count, why = int(partial["rejectedLogRecords"]), partial.get("errorMessage", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        # All were taken: the field is there only if not.
        return ""
    return f"{count} of them, {printable(str(why))}" if count else ""


def write_file(name: str, text: str) -> None:
    """Write a file that the user has named, and say so; raises UsageError if it cannot be written."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror}; name another file") from None
    # Not on stdout, which may have the JSON.
    print(f"slurm-elastic: wrote {name}", file=sys.stderr)


def log_requests(records: RunRecords, most: int = 1000) -> Iterator[dict[str, Any]]:
    """Yield the content of each request to a receiver's ``/v1/logs``: events as log records in the JSON of OTLP/HTTP.

    Source: opentelemetry-proto 1.9, opentelemetry/proto/logs/v1/logs.proto, and the OTLP specification, "JSON Protobuf
    Encoding": 64-bit numbers are text, names are in lower camel case.
    """
    events = sorted((*records.events, *records.progress), key=lambda event: event.time)
    resource = {"service.name": "slurm_elastic", "slurm_elastic.run": records.run_id}
    scope = {"name": "slurm_elastic", "version": __version__}
    while some := events[:most]:
        events = events[most:]
        logs = {"scope": scope, "logRecords": [_record(event) for event in some]}
        yield {"resourceLogs": [{"resource": {"attributes": _attributes(resource)}, "scopeLogs": [logs]}]}


def _record(event: Event) -> dict[str, Any]:
    severity = _severity(event)
    return {
        "timeUnixNano": str(round(event.time * 1e6) * 1000),
        "severityNumber": _SEVERITIES[severity],
        "severityText": severity,
        "eventName": f"slurm_elastic.{event.kind}",
        "body": {"stringValue": event.text or event.kind},
        "attributes": _attributes({key: value for key, value in event.fields.items() if key not in _IN_RECORD}),
    }


def _severity(event: Event) -> str:
    failed = event.kind == "run_ended" and event.word("outcome") in ("failed", "timed_out")
    if failed or (event.kind == "round_ended" and event.word("reason") == "worker_failed"):
        return "ERROR"
    return "WARN" if event.kind in _WARNINGS else "INFO"


def _attributes(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in fields.items() if value is not None]


def _value(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int() if -(2**63) <= value < 2**63:
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(item) for item in value]}}
        case dict():
            return {"kvlistValue": {"values": _attributes(value)}}
    return {"stringValue": str(value)}
