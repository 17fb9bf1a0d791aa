"""The records of a run as frozen values, with times in seconds since 1970: docs/events.md has their schema.

Records can be missing, cut short, damaged, or of a newer release. Each of these is one line in `RunRecords.problems`,
and the rest is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic.control.agent_side import TimeUse
from slurm_elastic.rendezvous.membership.agents import AgentIdentity
from slurm_elastic.rundir import RunContents, RunDir, RunFile
from slurm_elastic.text import parse_time

SCHEMA = 1
"""The newest schema of events and progress that this release knows."""
_KINDS = ("rounds", "failures", "notices", "endpoints", "starts", "replacements", "replaced")
_MOST = 2**53
"""Numbers from here on are damage: beyond it a double does not hold each whole number."""
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a file of events, which has no agent, or of progress, which has no text; time is that of the node."""

    time: float
    kind: str
    node: str
    agent: str = ""
    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """Return a field that should be a number; None if it is not."""
        return number(self.fields.get(name))

    def whole(self, name: str) -> int | None:
        """Return a field that should be a whole number; None if it is not."""
        return _whole(self.fields.get(name))

    def word(self, name: str) -> str:
        """Return a field that should be text; empty if it is not."""
        return _text(self.fields.get(name))

    @property
    def round(self) -> int | None:
        """The number of the round that the record is about; None if it names none."""
        return self.whole("round")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the record is about."""
        return tuple(name for name in _list(self.fields.get("nodes")) if isinstance(name, str))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of a `workers_ended`, or the one that a `progress` is about."""
        if self.kind == "progress":
            return (_worker({**self.fields, "rank": 0, "reports": True}),)
        return tuple(_worker(item) for item in _list(self.fields.get("workers")) if isinstance(item, dict))


@dataclass(frozen=True, slots=True)
class Worker:
    """The progress of a worker in a round; times in seconds since the workers of its node started."""

    rank: int = 0
    reports: bool = False
    steps: int = 0
    step: int | None = None
    first_step: int | None = None
    checkpoint: int | None = None
    loss: float | None = None
    loss_step: int | None = None
    first: float | None = None
    last: float | None = None
    before_first: TimeUse | None = None
    since_first: TimeUse | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds from its first step to its last."""
        return None if self.first is None or self.last is None else max(0.0, self.last - self.first)

    @property
    def steps_per_second(self) -> float | None:
        """Calls of should_stop per second."""
        return (self.steps - 1) / self.seconds if self.seconds and self.steps > 1 else None


@dataclass(frozen=True, slots=True)
class Round:
    """A round on record."""

    number: int
    reason: str = ""
    nodes: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    world_size: int = 0
    restarts: int = 0
    leader: str = ""
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """All records of a run.

    Attributes:
        failures: Root causes by incarnation.
        notices: Notices by ``<job>.<restart count>``.
        endpoints: Endpoints of leaders by incarnation.
        starts: Starts by their numbers.
        replacements: Jobs for lost nodes by their numbers; number 0 has the user's options.
    """

    run_id: str
    directory: str = ""
    rounds: tuple[Round, ...] = ()
    events: tuple[Event, ...] = ()
    progress: tuple[Event, ...] = ()
    done: Mapping[str, Any] | None = None
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    endpoints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    starts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replacements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """Script and arguments of the newest start; empty if it is not known."""
        words = _list(self.starts[max(self.starts)].get("command")) if self.starts else []
        return tuple(map(str, words))

    @property
    def newest(self) -> Round:
        """The newest round; before the first, one with the number -1."""
        return self.rounds[-1] if self.rounds else Round(-1)

    @property
    def endpoint(self) -> Mapping[str, Any] | None:
        """The endpoint of the newest leader; None if none is on record."""
        return self.endpoints.get(self.newest.incarnation) or next(iter(self.endpoints.values()), None)


def identity_of(agent: str) -> AgentIdentity:
    """Return the identity of an agent on record; one without a job if the record is damaged."""
    return AgentIdentity.parse(agent) or AgentIdentity("", "", 0, 0)


def read_records(run_dir: RunDir) -> RunRecords:
    """Read a run directory."""
    contents = RunContents(run_dir)
    files = {"events": contents.events(), "progress": contents.progress(), "done": contents.done()}
    files |= {kind: contents.records(kind) for kind in _KINDS}
    return run_records(run_dir.run_id, files, str(contents.path), contents.problems)


def run_records(
    run_id: str, files: Mapping[str, Sequence[RunFile]], directory: str = "", problems: Sequence[str] = ()
) -> RunRecords:
    """Return what the files of a run directory, by their kind, say. Pure."""
    damaged: list[str] = []
    objects = {
        kind: {file.stem: record for file in files.get(kind, ()) if (record := _object(file, damaged)) is not None}
        for kind in _KINDS
    }
    rounds = tuple(
        _round(int(stem), record) for stem, record in sorted(objects.pop("rounds").items()) if stem.isdigit()
    )
    events, progress = (_events(files.get(kind, ()), damaged) for kind in ("events", "progress"))
    done = next((_object(file, damaged) or {} for file in files.get("done", ())), None)
    return RunRecords(run_id, directory, rounds, events, progress, done, **objects, problems=(*problems, *damaged))


def _object(file: RunFile, problems: list[str]) -> Mapping[str, Any] | None:
    record = _record(file.content)
    if record is None:
        problems.append(f"{file.name} is cut short or damaged; it is left out")
    return record


def _record(content: bytes) -> Mapping[str, Any] | None:
    try:
        record = typed_json.loads(content)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _events(files: Sequence[RunFile], problems: list[str]) -> tuple[Event, ...]:
    events: list[Event] = []
    for file in files:
        *lines, rest = file.content.split(b"\n")
        parsed = [_event(line) for line in lines]
        events += [event for event in parsed if event is not None]
        damaged = [str(number) for number, event in enumerate(parsed, 1) if event is None]
        newer = max((event.whole("schema") or 0 for event in parsed if event is not None), default=0)
        if rest:
            problems.append(f"{file.name} is cut short: its last line is left out")
        if damaged:
            lines_, are = ("line", "is") if len(damaged) == 1 else ("lines", "are")
            shown = ", ".join(damaged[:5]) + (", ..." if len(damaged) > 5 else "")
            problems.append(f"{file.name}: {lines_} {shown} {are} damaged and left out")
        if newer > SCHEMA:
            problems.append(
                f"{file.name} is of a newer release (schema {newer}; this one knows {SCHEMA}): what is new in it is "
                "not shown; update slurm_elastic here"
            )
    return tuple(sorted(events, key=lambda event: event.time))


def _event(line: bytes) -> Event | None:
    record = _record(line)
    if record is None:
        return None
    time, kind, node = parse_time(record.get("time")), record.get("event"), record.get("node")
    if time is None or not isinstance(kind, str) or not isinstance(node, str):
        return None
    return Event(time, kind, node, _text(record.get("agent")), _text(record.get("text")), record)


def _round(number: int, record: Mapping[str, Any]) -> Round:
    places = [place for place in _list(record.get("places")) if isinstance(place, dict)]
    return Round(
        number=number,
        reason=_text(record.get("reason")),
        nodes=tuple(_text(place.get("node")) for place in places),
        agents=tuple(_text(place.get("agent")) for place in places),
        world_size=_count(record.get("world_size")),
        restarts=_whole(record.get("restarts")) or 0,
        leader=_text(record.get("leader")),
        incarnation=_text(record.get("scope")),
    )


def _worker(record: Mapping[str, Any]) -> Worker:
    return Worker(
        rank=_count(record.get("rank")),
        reports=record.get("reports") is True,
        steps=_whole(record.get("steps")) or 0,
        step=_whole(record.get("step")),
        first_step=_whole(record.get("first_step")),
        checkpoint=_whole(record.get("checkpoint")),
        loss=_loss(record.get("loss")),
        loss_step=_whole(record.get("loss_step")),
        first=number(record.get("first")),
        last=number(record.get("last")),
        before_first=_use(record.get("before_first")),
        since_first=_use(record.get("since_first")),
    )


def _use(value: object) -> TimeUse | None:
    if not isinstance(value, dict):
        return None
    loading, saving, restoring = (number(value.get(name)) or 0.0 for name in ("loading", "saving", "restoring"))
    return TimeUse(number(value.get("waiting")), loading, saving, restoring)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST else None


def _count(value: object) -> int:
    number = _whole(value) or 0
    return number if 0 <= number <= _MOST_RANKS else 0


def number(value: object) -> float | None:
    """Return a number on record; None if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
    return float(value) if is_number else None  # type: ignore[arg-type]


def _loss(value: object) -> float | None:
    return float(value) if value in ("nan", "inf", "-inf") and isinstance(value, str) else number(value)
