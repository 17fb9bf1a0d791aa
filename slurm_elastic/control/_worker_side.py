"""The worker's side of its control page."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterable, Mapping

from slurm_elastic.control._shared_page import (
    ATTACHED,
    AWAITED,
    BOUNDARY,
    BOUNDARY_TIME,
    CHECKPOINT,
    DEADLINE,
    FENCED,
    FIRST_STEP,
    FIRST_TIME,
    FIRST_USES,
    HOLD,
    LOSS,
    LOSS_STEP,
    NONE,
    REGISTERED,
    SAVE_TIME,
    SHIELDED,
    STEP,
    STOP,
    STOPPED,
    USES,
    Fields,
    PageError,
    float_bits,
    map_page,
    read_text,
    register,
)

VARIABLE = "SLURM_ELASTIC_CONTROL"
RECORDING = "SLURM_ELASTIC_REHEARSAL"
"""The directory in which the workers of a rehearsal write down what they do; see `_recording`."""
_POLL = 0.0005
"""Seconds between two reads of the page. All ranks wait while the agents agree, for a few round trips."""


class StopReason(str, enum.Enum):
    """The reason of a stop; a string, so that it can be compared, printed and stored as one."""

    PREEMPTED = "preempted"
    """Slurm preempts a job of the run."""
    TIME_LIMIT = "time_limit"
    """The time limit of a job is near."""
    DRAINED = "drained"
    """A node has to leave: ``slurm-elastic drain``, or an administrator drains it."""
    REQUEUED = "requeued"
    """A job goes back into the queue."""
    CANCELLED = "cancelled"
    """A job is cancelled."""
    NODE_LEFT = "node_left"
    """A node leaves, and the cause is unknown."""
    NODE_JOINED = "node_joined"
    """Nodes have come, and the group of workers grows."""

    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        # Python 3.12 and later format members of such an enum by their name (docs.python.org, enum).
        return str.__format__(self, format_spec)

    @classmethod
    def _missing_(cls, value: object) -> StopReason | None:
        """Take a reason of a later release of the agent as it is."""
        if not isinstance(value, str):
            return None
        reason = str.__new__(cls, value)
        reason._name_, reason._value_ = value.upper(), value
        return reason


class Stop:
    """The instruction to save a checkpoint and exit.

    Attributes:
        reason: Why the workers stop.
    """

    __slots__ = ("_fields", "reason")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self.reason = StopReason(read_text(fields))

    @property
    def seconds_left(self) -> float | None:
        """Seconds until this process is killed, at the least 0; None if there is no such time."""
        deadline = self._fields[DEADLINE]
        return None if deadline == NONE else max(0.0, deadline / 1e9 - time.monotonic())

    def __repr__(self) -> str:
        return f"Stop(reason={self.reason.value!r}, seconds_left={self.seconds_left})"


class WorkerControl:
    """The control page of a worker, used by one thread.

    Args:
        fields: The fields of the page.
        pause: Waits for a number of seconds; called repeatedly while the agents agree on a stop step.
        shield: See `slurm_elastic.control._fence`. Called at the first boundary, when the script has set its
            signal handlers, and when a stop is near. None for no shield.
    """

    __slots__ = ("_boundary", "_fields", "_pause", "_saved", "_shield", "_stop")

    def __init__(
        self,
        fields: Fields,
        pause: Callable[[float], None] = time.sleep,
        shield: Callable[[], bool] | None = None,
    ) -> None:
        self._fields, self._pause, self._shield = fields, pause, shield
        self._boundary = self._saved = 0
        self._stop: Stop | None = None
        fields[REGISTERED] = register()
        fields[ATTACHED] = 1

    def ask(self, step: int | None = None) -> Stop | None:
        """Count a boundary and return the answer of :func:`slurm_elastic.trainer.should_stop`.

        Args:
            step: The script's own count of steps; None if it does not report one.

        Raises:
            TypeError: The step is no whole number.
            ValueError: The step does not fit into 64 bits.
        """
        if self._stop is not None:
            return self._stop
        fields = self._fields
        if step is not None:
            fields[STEP] = step
        self._boundary = boundary = self._boundary + 1
        fields[BOUNDARY_TIME] = time.monotonic_ns()
        fields[BOUNDARY] = boundary
        # A memory barrier has to stand between these two lines. The agent executes it, see Agreement.hold.
        if fields[HOLD]:
            return self._wait(boundary)
        if boundary == 1:
            self._note_first()
            self._raise_shield()
        return None

    def _wait(self, boundary: int) -> Stop | None:
        fields = self._fields
        if boundary == 1:
            self._note_first()
        self._raise_shield()
        try:
            while not (stop := fields[STOP]):
                if not fields[HOLD]:
                    return None
                self._pause(_POLL)
        except BaseException:
            # A signal handler of the script has raised. This call gets no answer, so it does not count.
            self._boundary -= 1
            raise
        if boundary < stop:
            return None
        self._stop = Stop(fields)
        fields[STOPPED] = boundary
        return self._stop

    def measure(self) -> None:
        """Have the time of the calling thread measured from now on, see `_time_use`."""
        from slurm_elastic.control._time_use import start

        start(self._fields)

    def await_first(self, *, by_script: bool) -> None:
        """Note who comes to the first boundary: the script itself, which may forget it, or a loop or a framework."""
        self._fields[AWAITED] = time.monotonic_ns() if by_script else 0

    def _note_first(self) -> None:
        self._fields[FIRST_STEP] = self._fields[STEP]
        for field, use in zip(FIRST_USES, USES, strict=True):
            self._fields[field] = self._fields[use]
        self._fields[FIRST_TIME] = self._fields[BOUNDARY_TIME]

    def _raise_shield(self) -> None:
        if self._shield is not None:
            self._fields[SHIELDED] = int(self._shield())

    def report_checkpoint(self, step: int) -> None:
        """Report that the checkpoint of a step is in place.

        Raises:
            TypeError: The step is no whole number.
            ValueError: The step does not fit into 64 bits.
        """
        self._fields[CHECKPOINT] = step
        saved = self._fields[USES[2]]
        self._fields[SAVE_TIME], self._saved = saved - self._saved, saved

    def record_samples(self, epoch: int, samples: Iterable[int]) -> None:
        """Note the samples that this worker has trained on; only a rehearsal writes them down."""

    def report(self, step: int, loss: float) -> None:
        """Report the loss of a step. The agent may read a new loss with the step of the one before.

        Raises:
            TypeError: The step is no whole number, or the loss no number.
            ValueError: The step does not fit into 64 bits.
        """
        self._fields[LOSS] = float_bits(loss)
        self._fields[LOSS_STEP] = step

    @property
    def stopped(self) -> Stop | None:
        """The stop that `ask` has returned; None before."""
        return self._stop

    @property
    def fenced(self) -> bool:
        """True if the agent has said that another group of workers may be training."""
        return bool(self._fields[FENCED])


def attach(environ: Mapping[str, str], shield: Callable[[], bool] | None = None) -> WorkerControl | None:
    """Take the control page that the environment names.

    The first process that attaches removes the file, so that no other one can: a worker, or a program that a wrapper
    script starts, but no child of the trainer, such as a process of a data loader.

    Args:
        environ: Environment of this process.
        shield: See :class:`WorkerControl`.

    Returns:
        The control page; None if the environment names none, or if another process has taken it.
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
    if environ.get(RECORDING):
        from slurm_elastic.control._recording import RecordedControl

        return RecordedControl(fields, environ, shield)
    return WorkerControl(fields, shield=shield)
