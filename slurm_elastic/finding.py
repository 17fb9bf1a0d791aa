"""The result of a check, of a site before the first run or of a script in a rehearsal."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any


class Level(enum.Enum):
    """The weight of a finding."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It could not be found out."""
    LIMIT = "limit"
    """Runs work, with the limit that the finding names."""
    BROKEN = "broken"
    """Runs do not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        check: Name of the check, which programs can rely on, such as ``slurm.grace``.
        found: What was found, with numbers.
        why: What it means for runs.
        fix: What a person can do; empty for `Level.OK`.
        nodes: The nodes that it concerns; empty for the site as a whole.
        place: File and line of the script that it concerns; empty if that is unknown.
    """

    check: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""
    nodes: tuple[str, ...] = ()
    place: str = ""


class Check(str):
    """The name of a check; its methods make findings of it."""

    def ok(self, found: str, why: str = "") -> Finding:
        """Return that there is nothing to fix."""
        return Finding(self, Level.OK, found, why)

    def unknown(self, found: str, why: str = "", fix: str = "") -> Finding:
        """Return that it could not be found out."""
        return Finding(self, Level.UNKNOWN, found, why, fix)

    def limit(self, found: str, why: str, fix: str, nodes: tuple[str, ...] = (), place: str = "") -> Finding:
        """Return a limit with which runs work."""
        return Finding(self, Level.LIMIT, found, why, fix, nodes, place)

    def limit_if(self, limited: bool, found: str, why: str, fix: str, nodes: tuple[str, ...] = ()) -> Finding:
        """Return a limit if runs are limited by what was found, else that there is nothing to fix."""
        return self.limit(found, why, fix, nodes) if limited else self.ok(found, why)

    def broken(self, found: str, why: str, fix: str, nodes: tuple[str, ...] = (), place: str = "") -> Finding:
        """Return why runs do not work."""
        return Finding(self, Level.BROKEN, found, why, fix, nodes, place)

    def refused(self, error: str, why: str) -> Finding:
        """Return why runs do not work, by a line that ends with what a person can do."""
        found, _, fix = error.partition("; ")
        return self.broken(found, why, fix)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings about single nodes with those that say the same of several nodes made one."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    return [replace(finding, nodes=tuple(nodes)) for finding, nodes in groups.items()]


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if runs work, 1 if they work with limits, 2 if they do not work."""
    levels = {finding.level for finding in findings}
    return 2 if Level.BROKEN in levels else 1 if Level.LIMIT in levels else 0


def findings_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return findings as docs/rehearse.md describes them; those of docs/doctor.md have no place."""
    return [{**asdict(finding), "level": finding.level.value} for finding in findings]
