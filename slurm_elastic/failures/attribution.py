"""Attribution: the cause of a failure, and which of several failures is the root. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_elastic.failures.endings import ending
from slurm_elastic.failures.registry import BY_KERNEL, BY_WATCHDOG, Cause, Domain, Outlook, registry

_TRACEBACK = "Traceback (most recent call last):"
_END = 40
"""Lines at the end of a log without a traceback in which a cause is looked for: earlier ones were survived."""
_IN_USE = re.compile(r"(?:this process|Process \d+) has [\d.]+ \w+ memory in use", re.IGNORECASE)
"""Whose memory a GPU is full of (c10/cuda/CUDACachingAllocator.cpp, torch 2.13)."""
_KILL = 9
_UNKNOWN = Cause("unknown", "", Domain.UNKNOWN, Outlook.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The cause of a failure.

    Attributes:
        cause: A row of the registry; a row named `unknown` if none fits.
        detail: More about this failure, such as who uses the memory; empty for nothing.
    """

    cause: Cause
    detail: str = ""


def attribute(text: str, exit_code: int | None = None) -> Attribution:
    """Return the cause of a failure.

    Args:
        text: The traceback of the worker, else the end of its stderr; or the words of the watchdog or of the agent.
        exit_code: Of the worker, negative for a signal; None if it is unknown.
    """
    if exit_code == -_KILL and not text.startswith((BY_KERNEL, BY_WATCHDOG)):
        # SIGKILL comes from outside: what the worker wrote before says nothing about it.
        text = ""
    text = ending(text)
    if not text.startswith(_TRACEBACK):
        text = "\n".join(text.rstrip().split("\n")[-_END:])
    for row in registry():
        by_text = row.text is not None and row.text.search(text) is not None
        by_signal = exit_code is not None and exit_code < 0 and -exit_code in row.signals
        if by_text or by_signal:
            return Attribution(row, _detail(row, text))
    return Attribution(_UNKNOWN)


def explanation(cause: str, detail: str = "") -> str:
    """Return a cause in one line for people; empty for one that says no more than the failure itself.

    Args:
        cause: The name of a row.
        detail: Of the attribution.
    """
    row = named(cause)
    if row is None or not row.title:
        return ""
    domain = "" if row.domain is Domain.UNKNOWN else f" ({row.domain.words})"
    words = ", ".join(part for part in (f"{row.title}{domain}", row.outlook.words) if part)
    return f"{words}; {detail}" if detail else words


def named(cause: str) -> Cause | None:
    """Return the row of this name; None if this release has none."""
    return next((row for row in registry() if row.name == cause), None)


def _detail(row: Cause, text: str) -> str:
    if row.name == "gpu_memory":
        return ", ".join(dict.fromkeys(detail[0].lower() + detail[1:] for detail in _IN_USE.findall(text)))
    if row.name == "host_memory" and text.startswith(BY_KERNEL):
        return text.split("\n")[0].removeprefix(BY_KERNEL)
    return ""
