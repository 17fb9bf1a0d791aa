"""The failures of a run: the root cause of each, and what followed from it. Pure but for `read_failures`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_elastic.agent.root_cause import last_output
from slurm_elastic.failures.causes import attribute, named
from slurm_elastic.observe.records import RunRecords
from slurm_elastic.rundir import RunContents

_TRACEBACK = "Traceback (most recent call last):"
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)*")
_ROOT_RANK = re.compile(r"rank ([0-9]{1,9}): ")


@dataclass(frozen=True, slots=True)
class WorkerError:
    """The last words of a worker that ended with an error.

    Attributes:
        log: The file with the rest.
    """

    round: int
    node: str
    rank: int
    text: str
    log: str = ""

    @property
    def summary(self) -> str:
        """The last line, which in a traceback names the error."""
        return _last_line(self.text)


@dataclass(frozen=True, slots=True)
class Consequence:
    """Errors of workers that say the same but for numbers."""

    summary: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """Rounds that ended for the same reason.

    Attributes:
        rounds: Their numbers; more than one if the same failure came again.
        rank: The rank of the root cause; None if the failure is not one of a worker.
        attribution: The name of its cause in the registry of failures; empty if it is not one of a worker.
    """

    rounds: tuple[int, ...]
    cause: str
    node: str = ""
    rank: int | None = None
    text: str = ""
    log: str = ""
    followed: tuple[Consequence, ...] = ()
    final: bool = False
    attribution: str = ""


def read_failures(contents: RunContents, records: RunRecords) -> list[RoundFailure]:
    """Return the failures of a run, the one that ended it first, then the others from the first round on."""
    errors = []
    for number in contents.log_rounds():
        logs = {(log.node, log.rank): log.path for log in contents.logs(number) if log.stream == "stderr"}
        files = {(node, rank): path for node, rank, path in contents.error_files(number)}
        for node, rank in sorted({*logs, *files}, key=lambda worker: worker[1]):
            log, file = str(logs.get((node, rank), "")), str(files.get((node, rank), ""))
            text = last_output(file, log)
            if file or _TRACEBACK in text:
                errors.append(WorkerError(number, node, rank, text, log or file))
    return round_failures(records, errors)


def round_failures(records: RunRecords, errors: Sequence[WorkerError]) -> list[RoundFailure]:
    """Group the errors of workers by the failures that they follow from."""
    failures: list[RoundFailure] = []
    ended = (event for event in records.events if event.kind == "round_ended")
    ends = {number: event for event in ended if (number := event.round) is not None}
    # An agent fails for good in its last round only.
    lasts = {agent: round_.number for round_ in records.rounds for agent in round_.agents}
    agents = ((str(record.get("agent")), record) for record in records.failures.values())
    finals = {lasts[agent]: record for agent, record in agents if agent in lasts}
    failed = {number for number, event in ends.items() if event.word("reason") == "worker_failed"}
    for number in sorted({error.round for error in errors} | finals.keys() | failed):
        final = finals.get(number)
        mine = [error for error in errors if error.round == number]
        end, rank, node = ends.get(number), None, ""
        cause, detail = (end.text, end.word("detail")) if end is not None else (f"round {number} ended", "")
        if final is not None:
            rank, node = final.get("rank"), str(final.get("node", ""))
            cause = "the run failed"
        elif end is not None and end.word("reason") == "worker_failed":
            match = _ROOT_RANK.match(detail)
            rank, node = int(match[1]) if match else None, next(iter(end.nodes), "")
        root = next((error for error in mine if error.rank == rank), None)
        record = final or {}
        text, recorded = str(record.get("message") or ""), str(record.get("cause") or "")
        recorded = recorded or (end.word("cause") if end is not None else "")
        first = _root(mine) if rank is not None and _is_consequence(recorded or _cause(root)) else None
        if first is not None:
            # The round was ended before the worker that had caused it was known.
            root, rank, node, text, recorded = first, first.rank, first.node, first.text, ""
        text = text or (root.text if root else _ROOT_RANK.sub("", detail, count=1))
        failures.append(
            RoundFailure(
                rounds=(number,),
                cause=cause,
                node=node,
                rank=rank if isinstance(rank, int) else None,
                text=text,
                log=root.log if root else str(record.get("log", "")),
                followed=_grouped([error for error in mine if error is not root]),
                final=final is not None,
                attribution=recorded or (attribute(text).cause.name if isinstance(rank, int) else ""),
            )
        )
    return sorted(_counted(failures), key=lambda failure: (not failure.final, failure.rounds))


def _root(errors: Sequence[WorkerError]) -> WorkerError | None:
    """Return the one error that no other worker has caused; None if there is not exactly one."""
    roots = [error for error in errors if not _is_consequence(_cause(error))]
    return roots[0] if len(roots) == 1 else None


def _cause(error: WorkerError | None) -> str:
    return "" if error is None else attribute(error.text).cause.name


def _is_consequence(cause: str) -> bool:
    row = named(cause)
    return row is not None and row.consequence


def _grouped(errors: Sequence[WorkerError]) -> tuple[Consequence, ...]:
    groups: dict[str, list[WorkerError]] = {}
    for error in errors:
        groups.setdefault(_NUMBERS.sub("#", error.summary), []).append(error)
    return tuple(
        Consequence(members[0].summary, tuple(sorted({member.rank for member in members})))
        for members in groups.values()
    )


def _counted(failures: Sequence[RoundFailure]) -> list[RoundFailure]:
    """Merge failures of several rounds that say the same but for numbers; the newest one stays."""
    merged: dict[tuple[object, ...], RoundFailure] = {}
    for failure in failures:
        key = (_NUMBERS.sub("#", _last_line(failure.text) or failure.cause), failure.rank is None)
        before = merged.pop(key, None)
        rounds = (*(before.rounds if before else ()), *failure.rounds)
        merged[key] = replace(failure, rounds=rounds)
    return list(merged.values())


def _last_line(text: str) -> str:
    """Return the last line that is not blank; empty if all are."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
