"""Writes the events of a run: to the log, as JSON lines to the run directory, and to torch's event handler.

A thread of its own writes the file: a shared file system may be slow, and the agent must not wait for it.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import queue
import threading
from collections.abc import Mapping

from slurm_elastic.agent.console_log import notice
from slurm_elastic.agent.fact_lines import FactLines
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir, RunDirError

logger = logging.getLogger("slurm_elastic")

SCHEMA = 1
"""The version of the schema in docs/events.md. A reader that knows a version can read all records of it: fields and
kinds of events may be added without a new version; none goes away, and none changes its meaning."""

_SETTLE = 2.0
"""Seconds without an event after which people are told of those that no new round has followed."""
_NULL_HANDLER = "null"
"""torch's handler that drops everything (elastic/events/handlers.py, 2.13)."""


class EventLog:
    """Records the events of this agent.

    Args:
        run_dir: The run directory; its ``events/<node>.jsonl`` gets one JSON object per event: time (of this node's
            clock, for people), event, node (the writer), schema (see docs/events.md), text, and the event's own fields.
        node: Slurm's name of this node.
        destination: The name of torch's event handler (torchrun's ``--event-log-handler``).
        facts: Makes lines for people of the events; None where each event is a line.
    """

    def __init__(
        self, run_dir: RunDir, node: str, destination: str = _NULL_HANDLER, facts: FactLines | None = None
    ) -> None:
        self._run_dir, self._node, self._destination = run_dir, node, destination
        self._facts, self._fact_lock = facts, threading.Lock()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="slurm-elastic-events", daemon=True)
        self._thread.start()

    def add(self, entry: Entry, level: int = logging.INFO, origin: int | None = None) -> None:
        """Record one event. Returns at once.

        Args:
            entry: The event.
            level: The level of its line in the log.
            origin: See `FactLines.tell`.
        """
        logger.log(level, "%s", entry.text)
        if self._facts is not None:
            with self._fact_lock:
                for line in self._facts.tell(entry, origin):
                    notice(line)
        record_ = {**stamp(entry.event, self._node), "text": entry.text, **entry.fields}
        self._lines.put(json.dumps(record_))
        if self._destination != _NULL_HANDLER:
            _record_for_torch(f"slurm_elastic.{entry.event}", record_, self._destination)

    def close(self, timeout: float = 5.0) -> None:
        """Write out the remaining events, for at most `timeout` seconds."""
        self._lines.put(None)
        self._thread.join(timeout)

    def _tell_rest(self) -> None:
        if self._facts is not None:
            with self._fact_lock:
                for line in self._facts.rest("waits for other nodes"):
                    notice(line)

    def _write(self) -> None:
        has_warned = False
        while True:
            try:
                line = self._lines.get(timeout=None if self._facts is None else _SETTLE)
            except queue.Empty:
                self._tell_rest()
                continue
            if line is None:
                return
            try:
                self._run_dir.append_event(self._node, line)
            except RunDirError as error:
                if not has_warned:
                    logger.warning("events are not written: %s", error)
                has_warned = True


def stamp(event: str, node: str) -> dict[str, object]:
    """Return the first fields of every record of an agent."""
    return {"time": utc_now(), "event": event, "node": node, "schema": SCHEMA}


def utc_now() -> str:
    """Return the time of this node's clock in the format of records."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _record_for_torch(name: str, fields: Mapping[str, object], destination: str) -> None:
    # Not at the top: a coordinator, which has no workers, does not need torch.
    from torch.distributed.elastic.events import record
    from torch.distributed.elastic.events.api import Event, EventMetadataValue, EventSource

    metadata: dict[str, EventMetadataValue] = {
        key: value if isinstance(value, str | int | float) else json.dumps(value) for key, value in fields.items()
    }
    record(Event(name, EventSource.AGENT, metadata=metadata), destination)


def json_number(value: float | None) -> float | str | None:
    """Return a number for JSON, which has finite numbers only: ``nan``, ``inf`` and ``-inf`` become text."""
    return value if value is None or math.isfinite(value) else str(value)
