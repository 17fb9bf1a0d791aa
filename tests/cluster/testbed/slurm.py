"""Read what Slurm's own commands print. Pure."""

from __future__ import annotations

import re

_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z:/_]*)=")
_WHOLE_LINE = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "TRES", "JobName")
"""Fields whose value may hold ` Key=`; each stands last on its line."""

FINAL = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "BOOT_FAIL", "NODE_FAIL"}
)
"""Job states that end by themselves in no other. A preempted or requeued job is PENDING again instead."""


def records(text: str) -> list[dict[str, str]]:
    """The records that `scontrol show job` or `show node` prints, one dict of fields each."""
    return [_record(block) for block in re.split(r"\n\s*\n", text.strip()) if "=" in block]


def _record(block: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in block.splitlines():
        text = line.strip()
        while match := _FIELD.search(text):
            key, rest = match.group(1), text[match.end() :]
            following = None if key in _WHOLE_LINE and key != "JobName" else _FIELD.search(rest)
            fields[key] = (rest[: following.start()] if following else rest).strip()
            text = rest[following.start() :] if following else ""
    return fields
