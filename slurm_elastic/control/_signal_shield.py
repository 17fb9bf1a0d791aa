"""Handling of Slurm's signals in a worker that learns from its agent when to stop."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def shield() -> bool:
    """Make the signals with which Slurm announces an end have no effect on this process.

    Their default action ends the process. With ProctrackType=proctrack/linuxproc Slurm sends them to all processes of a
    step, and a worker would end before it can save; the agent gets them, too. A handler of the script stays in place.

    Returns:
        True if SIGTERM has no effect now. Then the agent uses SIGKILL where it would use SIGTERM.
    """
    # Only the main thread can set handlers; signal.signal raises ValueError in others.
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                # Not SIG_IGN: programs that the script starts would inherit it (execve(2)).
                signal.signal(number, _leave_to_agent)
                signal.siginterrupt(number, False)
    return signal.getsignal(signal.SIGTERM) is _leave_to_agent


def unshield() -> None:
    """Restore the default action, in a process that is no worker, such as one of a data loader."""
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            if signal.getsignal(number) is _leave_to_agent:
                signal.signal(number, signal.SIG_DFL)


def _leave_to_agent(number: int, frame: FrameType | None) -> None:
    pass
