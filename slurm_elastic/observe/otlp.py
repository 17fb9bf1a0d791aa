"""The events of a run as log records of OpenTelemetry, in the JSON of OTLP/HTTP. Pure.

Source: opentelemetry-proto 1.9, opentelemetry/proto/logs/v1/logs.proto, and the OTLP specification, "JSON Protobuf
Encoding": 64-bit numbers are text, names are in lower camel case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurm_elastic._version import __version__
from slurm_elastic.observe.records import Event, RunRecords

_INFO, _WARN, _ERROR = (9, "INFO"), (13, "WARN"), (17, "ERROR")
_SEVERITIES = {"node_lost": _WARN, "node_check_failed": _WARN, "worker_hung": _WARN}
_IN_RECORD = frozenset({"time", "event", "text", "schema"})
"""Fields that are no attributes of a record."""


def log_requests(records: RunRecords, most: int = 1000) -> Iterator[dict[str, Any]]:
    """Yield the content of each request to a receiver's ``/v1/logs``.

    Args:
        records: The run.
        most: Events in a request.
    """
    events = sorted((*records.events, *records.progress), key=lambda event: event.time)
    resource = {"service.name": "slurm_elastic", "slurm_elastic.run": records.run_id}
    scope = {"name": "slurm_elastic", "version": __version__}
    while some := events[:most]:
        events = events[most:]
        logs = {"scope": scope, "logRecords": [_record(event) for event in some]}
        yield {"resourceLogs": [{"resource": {"attributes": _attributes(resource)}, "scopeLogs": [logs]}]}


def _record(event: Event) -> dict[str, Any]:
    number, name = _severity(event)
    return {
        "timeUnixNano": str(round(event.time * 1e6) * 1000),
        "severityNumber": number,
        "severityText": name,
        "eventName": f"slurm_elastic.{event.kind}",
        "body": {"stringValue": event.text or event.kind},
        "attributes": _attributes({key: value for key, value in event.fields.items() if key not in _IN_RECORD}),
    }


def _severity(event: Event) -> tuple[int, str]:
    failed = event.kind == "run_ended" and event.word("outcome") in ("failed", "timed_out")
    if failed or (event.kind == "round_ended" and event.word("reason") == "worker_failed"):
        return _ERROR
    return _SEVERITIES.get(event.kind, _INFO)


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
