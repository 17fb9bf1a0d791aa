"""The state of a run from what Slurm's accounting says of its jobs.

State names: sacct(1), "JOB STATE CODES", 22.05 to 26.05.
"""

from __future__ import annotations

from collections.abc import Iterable

_GOES_ON = frozenset(
    {
        "COMPLETING",
        "CONFIGURING",
        "PENDING",
        "PREEMPTED",
        "READY",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "RESV_DEL_HOLD",
        "RUNNING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "UNKNOWN",
    }
)
"""submitit's own list (submitit/core/core.py, InfoWatcher.is_done, 1.5.4) lacks RESIZING, in which a job is recorded
that goes on without a lost node, and SUSPENDED."""

_BY_RELEVANCE = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "NODE_FAIL", "DEADLINE", "TIMEOUT", "CANCELLED")
"""Final states, from the one that explains the end of a run best to the one that explains it least."""


def is_final(state: str) -> bool:
    """Return True if a job in this state has ended for good."""
    return _base(state) not in _GOES_ON


def state_of_array(states: Iterable[str]) -> str:
    """Return the state of a run, given the states of the elements of its array."""
    bases = [_base(state) for state in states]
    for state in bases:
        if state in _GOES_ON and state != "PENDING":
            return "RUNNING"
    if "PENDING" in bases:
        return "PENDING"
    if "COMPLETED" in bases:
        # An agent exits with 0 only when the run is finished.
        return "COMPLETED"
    return next((state for state in _BY_RELEVANCE if state in bases), bases[0] if bases else "UNKNOWN")


def _base(state: str) -> str:
    """Return CANCELLED for ``CANCELLED by 1000``."""
    return (state.split() or ["UNKNOWN"])[0].upper()
