"""The failures of a run: the root cause of each, and what followed from it. Pure but for `read_failures`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_elastic.agent.root_cause import last_output
from slurm_elastic.failures.causes import attribute, named
from slurm_elastic.observe.records import RunRecords
from slurm_elastic.observe.views import Failure
from slurm_elastic.rundir import RunContents

_TRACEBACK = "Traceback (most recent call last):"
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)*")
_ROOT_RANK = re.compile(r"rank ([0-9]{1,9}): ")


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """Rounds that ended for the same reason.

    Attributes:
        rounds: Their numbers; more than one if the same failure came again.
        reason: The line about their end.
        root: Its rank is None if the failure is not one of a worker.
        followed: Ranks that failed because of it, by their errors.
        final: True if it has ended the run.
    """

    rounds: tuple[int, ...]
    reason: str
    root: Failure
    followed: Mapping[str, Sequence[int]]
    final: bool = False


def read_failures(contents: RunContents, records: RunRecords) -> list[RoundFailure]:
    """Return the failures of a run, the one that ended it first, then the others from the first round on."""
    errors: dict[int, list[Failure]] = {}
    for number in contents.log_rounds():
        logs = {(log.node, log.rank): log.path for log in contents.logs(number) if log.stream == "stderr"}
        files = {(node, rank): path for node, rank, path in contents.error_files(number)}
        for node, rank in sorted({*logs, *files}, key=lambda worker: worker[1]):
            log, file = str(logs.get((node, rank), "")), str(files.get((node, rank), ""))
            text = last_output(file, log)
            if file or _TRACEBACK in text:
                errors.setdefault(number, []).append(Failure(node, rank, text, log or file))
    return round_failures(records, errors)


def round_failures(records: RunRecords, errors: Mapping[int, Sequence[Failure]]) -> list[RoundFailure]:
    """Group the errors of workers, by their rounds, by the failures that they follow from."""
    ended = (event for event in records.events if event.kind == "round_ended")
    ends = {number: event for event in ended if (number := event.round) is not None}
    # An agent fails for good in its last round only.
    lasts = {agent: round_.number for round_ in records.rounds for agent in round_.agents}
    agents = ((str(record.get("agent")), record) for record in records.failures.values())
    finals = {lasts[agent]: record for agent, record in agents if agent in lasts}
    failed = {number for number, event in ends.items() if event.word("reason") == "worker_failed"}
    failures = []
    for number in sorted(errors.keys() | finals.keys() | failed):
        end, final, mine = ends.get(number), finals.get(number), errors.get(number, ())
        record = final or {}
        rank, node, text = record.get("rank"), str(record.get("node", "")), str(record.get("message") or "")
        reason, detail, cause = f"round {number} ended", "", str(record.get("cause") or "")
        if end is not None:
            reason, detail, cause = end.text, end.word("detail"), cause or end.word("cause")
        if final is not None:
            reason = "the run failed"
        elif end is not None and number in failed:
            match = _ROOT_RANK.match(detail)
            rank, node = int(match[1]) if match else None, next(iter(end.nodes), "")
        own = next((error for error in mine if error.rank == rank), None)
        root = _root(mine) if rank is not None and _is_consequence(cause or _cause(own)) else None
        if root is not None:
            # The round was ended before the worker that had caused it was known.
            own = root
        else:
            text = text or (own.text if own else _ROOT_RANK.sub("", detail, count=1))
            log = own.log if own else str(record.get("log", ""))
            root = Failure(node, rank if isinstance(rank, int) else None, text, log, cause)
        if root.rank is not None and not root.cause:
            root = replace(root, cause=_cause(root))
        followed = _grouped([error for error in mine if error is not own])
        failures.append(RoundFailure((number,), reason, root, followed, final is not None))
    return sorted(_counted(failures), key=lambda failure: (not failure.final, failure.rounds))


def _root(errors: Sequence[Failure]) -> Failure | None:
    """Return the one error that no other worker has caused; None if there is not exactly one."""
    roots = [error for error in errors if not _is_consequence(_cause(error))]
    return roots[0] if len(roots) == 1 else None


def _cause(error: Failure | None) -> str:
    return "" if error is None else attribute(error.text).cause.name


def _is_consequence(cause: str) -> bool:
    row = named(cause)
    return row is not None and row.consequence


def _grouped(errors: Sequence[Failure]) -> dict[str, list[int]]:
    """Return the ranks whose errors say the same but for numbers, by the last line of the first of these errors."""
    groups: dict[str, list[Failure]] = {}
    for error in errors:
        groups.setdefault(_NUMBERS.sub("#", _last_line(error.text)), []).append(error)
    return {
        _last_line(members[0].text): sorted({member.rank or 0 for member in members}) for members in groups.values()
    }


def _counted(failures: Sequence[RoundFailure]) -> list[RoundFailure]:
    """Merge failures of several rounds that say the same but for numbers; the newest one stays."""
    merged: dict[tuple[object, ...], RoundFailure] = {}
    for failure in failures:
        key = (_NUMBERS.sub("#", _last_line(failure.root.text) or failure.reason), failure.root.rank is None)
        before = merged.pop(key, None)
        rounds = (*(before.rounds if before else ()), *failure.rounds)
        merged[key] = replace(failure, rounds=rounds)
    return list(merged.values())


def _last_line(text: str) -> str:
    """Return the last line that is not blank; empty if all are."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
