"""Repetition: a failure that is the one before again, so that another restart is senseless. Pure functions."""

from __future__ import annotations

import re

from slurm_elastic.failures.attribution import Attribution
from slurm_elastic.failures.endings import without_prefixes
from slurm_elastic.failures.registry import Domain, Outlook

BEFORE_FIRST_STEP = "before the first step"
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+)', re.MULTILINE)
_RAISED = re.compile(r"^(?!Traceback \()\S.*", re.MULTILINE)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)*")
_WIDTH = 200
_CAN_HELP = frozenset({Outlook.AGAIN, Outlook.ELSEWHERE})


def position(*, reports: bool, calls: int, step: int | None) -> str | None:
    """Return where in the training a worker was; None if that cannot be compared with another round.

    Args:
        reports: True if the script uses the trainer API.
        calls: Calls of should_stop in this round.
        step: The step that the script gave to the last of them, in its own count; None if it gave none. The number of
            calls is not comparable: a round may start from a later checkpoint than the one before.
    """
    if not reports:
        return None
    if calls == 0:
        return BEFORE_FIRST_STEP
    return None if step is None else f"at step {step}"


def fingerprint(attribution: Attribution, text: str, exit_code: int, where: str | None) -> str:
    """Return what two failures have in common if the second is the first one again; empty if that is never known.

    It is empty for a consequence of another failure, for a signal from outside, and where a restart can help. A script
    that does not say where it was has one only if a restart will not help.

    Args:
        attribution: Of the failure.
        text: The traceback of the worker, or the end of its stderr.
        exit_code: Of the worker, negative for a signal.
        where: Of the worker, see `position`.
    """
    row = attribution.cause
    outside = row.domain is Domain.UNKNOWN and exit_code < 0 and row.name != "hang"
    if row.consequence or outside or row.outlook in _CAN_HELP:
        return ""
    if where is None and row.outlook is not Outlook.NOT_AGAIN:
        return ""
    text = without_prefixes(text)
    frames = list(_FRAME.finditer(text))
    raised = _RAISED.search(text, frames[-1].end() if frames else 0)
    words = "" if row.name == "hang" or raised is None else _NUMBERS.sub("#", raised[0])[:_WIDTH]
    place = f"{frames[-1][1]}:{frames[-1][2]}" if frames else ""
    return " | ".join((row.name, str(exit_code), words, place[-_WIDTH:], where or ""))
