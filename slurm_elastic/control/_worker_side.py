"""The worker's end of its control page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from slurm_elastic.control._membarrier import register
from slurm_elastic.control._shared_page import (
    ATTACHED,
    BOUNDARY,
    BOUNDARY_TIME,
    CHECKPOINT,
    DEADLINE,
    FENCED,
    HOLD,
    NONE,
    REGISTERED,
    SHIELDED,
    STEP,
    STOP,
    STOPPED,
    Fields,
    PageError,
    map_page,
    read_text,
)

__all__ = ["VARIABLE", "Stop", "WorkerControl", "attach"]

VARIABLE = "SLURM_ELASTIC_CONTROL"
_POLL = 0.0005
"""Seconds. All ranks wait together, for as long as the agents need to agree: a few round trips."""


class Stop:
    """The word to save a checkpoint and end.

    Attributes:
        reason: preempted, time_limit, drained or requeued, as the node or nodes that have to go say; node_joined when
            the group grows.
    """

    __slots__ = ("_fields", "reason")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self.reason = read_text(fields)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until this process is killed, at the least 0; None if there is no such time."""
        deadline = self._fields[DEADLINE]
        return None if deadline == NONE else max(0.0, deadline / 1e9 - time.monotonic())

    def __repr__(self) -> str:
        return f"Stop(reason={self.reason!r}, seconds_left={self.seconds_left})"


class WorkerControl:
    """What a worker says to its agent and hears from it, on one thread.

    Args:
        fields: of its page.
        pause: waits so many seconds; called again and again while the agents agree.
        shield: see `slurm_elastic.control._signal_shield`; called by the first question, when the script has
            set up what it does about signals, and when a stop is near. None for none.
    """

    __slots__ = ("_boundary", "_fields", "_pause", "_shield", "_stop")

    def __init__(
        self,
        fields: Fields,
        pause: Callable[[float], None] = time.sleep,
        shield: Callable[[], bool] | None = None,
    ) -> None:
        self._fields, self._pause, self._shield = fields, pause, shield
        self._boundary = 0
        self._stop: Stop | None = None
        fields[REGISTERED] = register()
        fields[ATTACHED] = 1

    def ask(self, step: int | None = None) -> Stop | None:
        """Come to the next boundary; see :func:`slurm_elastic.trainer.should_stop`.

        Raises:
            TypeError: the step is no whole number.
            ValueError: it does not fit into 64 bits.
        """
        if self._stop is not None:
            return self._stop
        fields = self._fields
        if step is not None:
            fields[STEP] = step
        self._boundary = boundary = self._boundary + 1
        fields[BOUNDARY_TIME] = time.monotonic_ns()
        fields[BOUNDARY] = boundary
        # Between these two lines belongs a memory barrier. The agent has it executed, see Agreement.hold.
        if fields[HOLD]:
            return self._wait(boundary)
        if boundary == 1:
            self._raise_shield()
        return None

    def _wait(self, boundary: int) -> Stop | None:
        fields = self._fields
        self._raise_shield()
        try:
            while not (stop := fields[STOP]):
                if not fields[HOLD]:
                    return None
                self._pause(_POLL)
        except BaseException:
            # A signal handler of the script has raised: this call does not count, it gets no answer.
            self._boundary -= 1
            raise
        if boundary < stop:
            return None
        self._stop = Stop(fields)
        fields[STOPPED] = boundary
        return self._stop

    def _raise_shield(self) -> None:
        if self._shield is not None:
            self._fields[SHIELDED] = int(self._shield())

    def checkpointed(self, step: int) -> None:
        """Report a checkpoint.

        Raises:
            TypeError: the step is no whole number.
            ValueError: it does not fit into 64 bits.
        """
        self._fields[CHECKPOINT] = step

    @property
    def stopped(self) -> Stop | None:
        """The stop that it was told; None before."""
        return self._stop

    @property
    def fenced(self) -> bool:
        """Whether the agent said that another group of workers may be training."""
        return bool(self._fields[FENCED])


def attach(environ: Mapping[str, str], shield: Callable[[], bool] | None = None) -> WorkerControl | None:
    """Take the control page that the environment names.

    The first process that comes takes it, by removing its name: a worker, or what a worker that is a mere wrapper
    starts, but not what the trainer itself starts, such as the processes of a data loader.

    Args:
        environ: of this process.
        shield: see :class:`WorkerControl`.

    Returns:
        None if there is none to take.
    """
    path = environ.get(VARIABLE)
    if not path:
        return None
    try:
        fields = map_page(path)
        os.unlink(path)  # noqa: PTH108 (pathlib takes milliseconds to import)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, PageError) as error:
        import logging

        logging.getLogger("slurm_elastic").warning("this worker cannot be told to stop at a step: %s", error)
        return None
    return WorkerControl(fields, shield=shield)
