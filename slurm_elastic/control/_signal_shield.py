"""The signals of Slurm, in a worker that its agent will tell when and where to stop."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

__all__ = ["shield", "unshield"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def shield() -> bool:
    """Take their default action, which is to end the process, from the signals with which Slurm announces an end.

    Where ProctrackType is proctrack/linuxproc, it sends them to all processes of a step, and a worker would be gone
    before it can save. The agent got them too. What the script does about a signal stays as it is.

    Returns:
        Whether SIGTERM has no effect now: then the agent ends this process by SIGKILL where it would by SIGTERM.
    """
    # Outside of the main thread there is nothing to be done.
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                # Not ignored: programs that the script starts would ignore it, too (execve(2)).
                signal.signal(number, _leave_to_agent)
                signal.siginterrupt(number, False)
    return signal.getsignal(signal.SIGTERM) is _leave_to_agent


def unshield() -> None:
    """Give the default action back, in a process that is no worker, such as one of a data loader."""
    with contextlib.suppress(ValueError):
        for number in _SIGNALS:
            if signal.getsignal(number) is _leave_to_agent:
                signal.signal(number, signal.SIG_DFL)


def _leave_to_agent(number: int, frame: FrameType | None) -> None:
    pass
