"""The description of a worker that hangs, the signal to it, and the file of its stacks."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass

from slurm_elastic.agent.watchdog._proc import Watched
from slurm_elastic.ownership import write_own

logger = logging.getLogger("slurm_elastic")


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker whose timer expired, or that takes no step any more.

    Attributes:
        worker: The worker that hangs.
        scope: The name of its timer.
        pid: The process that started the timer: the worker, or one that it started.
        seconds: How long the timer ran.
        state: The worker's state, see :class:`ProcessState`; D is uninterruptible sleep, which no signal ends.
        killed: The signal; None if the client wants no kill.
        stacks: The file with the stacks of its threads; empty if it could not be written.
        steps: The number of steps that it has taken in its round, if it takes no further one; None for a timer.
        in_collective: True if its main thread was in a collective; None if that is unknown.
    """

    worker: Watched
    scope: str
    pid: int
    seconds: float
    state: str
    killed: signal.Signals | None
    stacks: str
    steps: int | None = None
    in_collective: bool | None = None

    def __str__(self) -> str:
        text = f"timer {self.scope!r} expired after {self.seconds:.1f} s"
        if self.steps is not None:
            text = f"no step for {self.seconds:.1f} s, after {self.steps} in this round"
        if self.state == "D":
            text += ", in uninterruptible sleep"
        text += f"; killed with {self.killed.name}" if self.killed else "; not killed, as its client asks"
        return text + (f"; stacks in {self.stacks}" if self.stacks else "")


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal; log an error if that fails."""
    try:
        os.kill(pid, number)
    except OSError as error:
        logger.error("process %s cannot be killed: %s", pid, error.strerror)


def write_stacks(worker: Watched, text: str) -> str:
    """Append stacks to the file beside the worker's logs; return its path, empty if it cannot be written."""
    if worker.logs is None:
        logger.warning("stacks of rank %s:\n%s", worker.rank, text)
        return ""
    path = worker.logs / "stacks.txt"
    try:
        with os.fdopen(write_own(path, append=True), "a") as file:
            file.write(text + "\n")
    except OSError as error:
        logger.warning("the stacks of rank %s are not kept: %s: %s", worker.rank, path, error.strerror)
        return ""
    return str(path)
