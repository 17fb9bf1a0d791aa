"""The events of a run: written as JSON lines and to the log, and told as one line per fact.

A loss, a drain or a failure is several events. `FactLines`, which is pure, gathers them until the round is there with
which the others go on, so that fifty nodes that are lost or preempted at once are one line for people.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slurm_elastic.agent.console_log import notice
from slurm_elastic.agent.line_writer import LineWriter
from slurm_elastic.rendezvous.run_events import Entry
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import natural_key
from slurm_elastic.text import counted

logger = logging.getLogger("slurm_elastic")

SCHEMA = 1
"""The version of the schema in docs/events.md. A reader that knows a version can read all records of it: fields and
kinds of events may be added without a new version; none goes away, and none changes its meaning."""

_SETTLE = 2.0
"""Seconds without an event after which people are told of those that no new round has followed."""
_DETAILS = frozenset({"round_ending", "leader_changed", "leader_resigned", "node_spare", "agent_ended", "worker_hung"})
"""Events that the log of an agent has: another line tells what matters of them, or they are told by themselves."""
_LEFT = {"time_limit": "at the time limit", "node_left": "left"}
"""Words for reasons of a leave that are no English by themselves."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Reached:
    """The progress of the workers, in the script's own steps; None where that is unknown."""

    step: int | None = None
    checkpoint: int | None = None
    nodes: int | None = None


class FactLines:
    """Gathers events, and returns lines."""

    def __init__(self, run: str, max_restarts: int, reached: Callable[[], Reached] = Reached) -> None:
        self._run, self._max_restarts, self.reached = run, max_restarts, reached
        self._told: set[str] = set()
        self._nodes = 0
        self._gone: dict[tuple[str, str], dict[str, None]] = {}
        self._begin()

    def _begin(self) -> None:
        self._told |= self._named("lost") | self._named("left")
        self._at: Reached | None = None
        self._gone = {}
        self._failure, self._over, self._planned = "", False, False

    @property
    def pending(self) -> bool:
        """True if there are events that no line has told."""
        return bool(self._gone or self._failure)

    def tell(self, entry: Entry, origin: int | None = None) -> tuple[str, ...]:
        """Take in an event, and return the lines that are due.

        Args:
            origin: The step of the snapshot that the workers of a round start from; None for none.
        """
        fields = entry.fields
        nodes, why, reason = _names(fields.get("nodes")), str(fields.get("why", "")), str(fields.get("reason", ""))
        match entry.event:
            case "node_lost":
                self._note(("lost", why), nodes)
            case "node_left" if why not in ("finished", "failed"):
                self._note(("left", why), nodes)
            case "round_ended":
                self._round_ended(entry, reason, nodes)
                if self._at is not None and len(self._named("left")) == self._size(self._at) > 0:
                    # No node is left to go on.
                    return self.rest()
            case "round_formed":
                line = self._formed(fields, reason, nodes, origin)
                self._told -= set(nodes)
                self._nodes = len(nodes)
                return (line,)
            case "run_ended":
                lines = self.rest()
                # The root cause, which the leader prints last, tells of the worker that has failed.
                has_own_line = fields.get("outcome") == "succeeded" or "rank" in fields
                return lines if has_own_line else (*lines, entry.text)
            case event if event not in _DETAILS and event != "node_left":
                return (entry.text,)
        return ()

    def rest(self, last: str = "") -> tuple[str, ...]:
        """Return the line about the events of which no new round has told."""
        leaves = len(self._named("left"))
        # Those that leave are told of when their round is over.
        if not self.pending or (last and leaves and not self._over):
            return ()
        at, heads = self._at or Reached(), self._heads()
        last = "" if leaves and leaves >= self._size(at) else last
        stopped = self._stopped(at, None) if self._planned else f"after step {at.step}" if at.step is not None else ""
        self._begin()
        return (f"{heads}{': ' if stopped or last else ''}{', '.join(filter(None, (stopped, last)))}",)

    def _note(self, how: tuple[str, str], nodes: Sequence[str]) -> None:
        if self._at is None:
            self._at = self.reached()
        known = self._told | self._named(how[0])
        new = {node: None for node in nodes if node not in known}
        if new:
            self._gone.setdefault(how, {}).update(new)

    def _size(self, at: Reached) -> int:
        return self._nodes or at.nodes or 0

    def _named(self, kind: str) -> set[str]:
        return {node for (each, _), nodes in self._gone.items() for node in nodes if each == kind}

    def _round_ended(self, entry: Entry, reason: str, nodes: Sequence[str]) -> None:
        detail = str(entry.fields.get("detail", ""))
        self._planned, self._over = entry.fields.get("step") is not None, True
        if self._planned or self._at is None:
            # The workers have saved since the first of its nodes left.
            self._at = self.reached()
        match reason:
            case "node_lost":
                self._note(("lost", detail), nodes)
            case "node_left":
                self._note(("left", detail), nodes)
            case "node_joined":
                self._note(("joined", ""), nodes)
            case "worker_failed" if entry.fields.get("unusable"):
                self._failure = detail
            case "worker_failed":
                told = entry.text.partition(f"({detail})")[2]
                rank, _, error = detail.partition(": ")
                self._failure = f"{rank} on {', '.join(nodes)} failed: {error}{told}"

    def _formed(self, fields: dict[str, object], reason: str, nodes: Sequence[str], origin: int | None) -> str:
        round_, seconds, restarts = fields["round"], fields["seconds"], fields["restarts"]
        mark = f"[round {round_} in {seconds:.2f} s]"
        if reason in ("start", "requeued") or not self.pending:
            goes_on = f" goes on from step {origin}" if origin is not None else " goes on"
            begun = "starts" if reason == "start" else goes_on.strip()
            self._begin()
            workers = counted(int(str(fields["world_size"])), "worker")
            return f"run {self._run} {begun}: {counted(len(nodes), 'node')} ({_shown(nodes)}), {workers} {mark}"
        at = self._at or Reached()
        # Of those that are there, and of all if some are gone.
        of_all = f" of {self._size(at)}" if self._size(at) > len(nodes) else ""
        who = f"{len(nodes)}{of_all} node{'' if len(nodes) == 1 and not of_all else 's'}"
        go = "goes on" if len(nodes) == 1 else "go on"
        if self._planned:
            told = [self._stopped(at, origin), f"{who} {go}"]
        else:
            start = at.checkpoint if origin is None else origin
            told = [f"{who} {go}" + (f" from step {start}" if start is not None else "")]
            if start is not None and at.step is not None and at.step > start:
                told.append(f"{counted(at.step - start, 'step')} again")
            elif start is None and at.step is not None:
                told.append(f"which had come to step {at.step}")
        if self._failure:
            told.append(f"{restarts} of {counted(self._max_restarts, 'restart')} used")
        line = f"{self._heads()}: {', '.join(filter(None, told))} {mark}"
        self._begin()
        return line

    def _stopped(self, at: Reached, origin: int | None) -> str:
        if at.step is None:
            return "all stopped"
        return f"all {'saved' if at.step in (at.checkpoint, origin) else 'stopped at'} step {at.step}"

    def _heads(self) -> str:
        size = self._size(self._at or Reached())
        told = [_head(kind, why, sorted(nodes, key=natural_key), size) for (kind, why), nodes in self._gone.items()]
        return "; ".join([*([self._failure] if self._failure else []), *told])


def _head(kind: str, why: str, nodes: Sequence[str], size: int) -> str:
    if kind == "left" and len(nodes) == size > 1:
        return f"all {size} nodes {_LEFT.get(why, why)}"
    many = len(nodes) > _SHOWN
    who = counted(len(nodes), "node") if many else ", ".join(nodes)
    names = [_shown(nodes)] if many else []
    if kind == "left":
        how = _LEFT.get(why, why)
    else:
        how = kind
        names += [why.replace("its ", "their ", 1) if len(nodes) > 1 else why] if why else []
    return f"{who} {how}" + (f" ({'; '.join(names)})" if names else "")


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _shown(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= _SHOWN else f"{', '.join(nodes[:2])}, ... {nodes[-1]}"


class EventLog:
    """Records the events of this agent in ``events/<node>.jsonl`` of the run directory; docs/events.md has the schema.

    Args:
        facts: Makes lines for people of the events; None where each event is a line.
    """

    def __init__(self, run_dir: RunDir, node: str, facts: FactLines | None = None) -> None:
        self._node = node
        self._facts, self._fact_lock = facts, threading.Lock()
        self._writer = LineWriter("events are")
        append = functools.partial(run_dir.append_event, node)
        self._writer.start(append, lambda: None if facts is None else _SETTLE, self._settle)

    def add(self, entry: Entry, level: int = logging.INFO, origin: int | None = None) -> None:
        """Record one event. Returns at once."""
        logger.log(level, "%s", entry.text)
        self._tell(lambda facts: facts.tell(entry, origin))
        self._writer.put(json.dumps({**stamp(entry.event, self._node), "text": entry.text, **entry.fields}))

    def close(self, timeout: float = 5.0) -> None:
        """Write out the remaining events, for at most `timeout` seconds."""
        self._writer.close(timeout)

    def _tell(self, lines: Callable[[FactLines], Iterable[str]]) -> None:
        if self._facts is not None:
            with self._fact_lock:
                for line in lines(self._facts):
                    notice(line)

    def _settle(self) -> None:
        self._tell(lambda facts: facts.rest("waits for other nodes"))


def stamp(event: str, node: str) -> dict[str, object]:
    """Return the first fields of every record of an agent."""
    return {"time": utc_now(), "event": event, "node": node, "schema": SCHEMA}


def utc_now() -> str:
    """Return the time of this node's clock in the format of records."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def json_number(value: float | None) -> float | str | None:
    """Return a number for JSON, which has finite numbers only: ``nan``, ``inf`` and ``-inf`` become text."""
    return value if value is None or math.isfinite(value) else str(value)
