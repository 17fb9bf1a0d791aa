"""The worker's side: its control page, its use of time, its fence in the run directory, its handling of signals."""

from __future__ import annotations

import _thread
import contextlib
import enum
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType

from slurm_elastic.control import shared_page as page

VARIABLE = "SLURM_ELASTIC_CONTROL"
RECORDING = "SLURM_ELASTIC_REHEARSAL"
"""The directory in which the workers of a rehearsal write down what they do; see `_recording`."""
SWITCH = "SLURM_ELASTIC_TIME_USE"
"""``off`` in the environment of a worker: nothing is measured, and no thread answers the agent."""
_MEASURE_INTERVAL_NS = 250_000_000
"""Time between two measurements, at least: one takes as long as several questions of the script."""
_USES = {"loading": page.LOADING, "saving": page.SAVING, "restoring": page.RESTORING}
_NEVER = 2**63
_POLL = 0.0005
"""Seconds between two reads of the page. All ranks wait while the agents agree, for a few round trips."""


class StopReason(str, enum.Enum):
    """The reason of a stop; a string, so that it can be compared, printed and stored as one."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    """The time limit of a job is near."""
    DRAINED = "drained"
    """A node has to leave: ``slurm-elastic drain``, or an administrator drains it."""
    REQUEUED = "requeued"
    """A job goes back into the queue."""
    CANCELLED = "cancelled"
    NODE_LEFT = "node_left"
    """A node leaves, and the cause is unknown."""
    NODE_JOINED = "node_joined"
    """Nodes have come, and the group of workers grows."""

    __str__ = str.__str__

    @classmethod
    def _missing_(cls, value: object) -> StopReason:
        """Take a reason of a later release of the agent for one that is unknown."""
        return cls.NODE_LEFT


class Stop:
    """The instruction to save a checkpoint and exit."""

    __slots__ = ("_fields", "reason")

    def __init__(self, fields: page.Fields) -> None:
        self._fields = fields
        self.reason = StopReason(page.read_text(fields))

    @property
    def seconds_left(self) -> float | None:
        """Seconds until this process is killed, at the least 0; None if there is no such time."""
        deadline = self._fields[page.DEADLINE]
        return None if deadline == page.NONE else max(0.0, deadline / 1e9 - time.monotonic())

    def __repr__(self) -> str:
        return f"Stop(reason={self.reason.value!r}, seconds_left={self.seconds_left})"


def is_on_gpu() -> bool:
    """Return True if this process computes on a GPU."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


class TimeMeter:
    """Measures for what the thread that makes it spends its time, and writes it to the control page.

    The kernel knows how long the thread sleeps, and in a script that computes that is waiting for other ranks. What
    sleeps for input or for a file says so, see `counts`.

    Raises:
        OSError: The kernel does not tell the times of threads (no /proc, or built without CONFIG_SCHED_INFO).
    """

    def __init__(self, fields: page.Fields) -> None:
        self._fields, self._thread = fields, _thread.get_ident()
        path = f"/proc/self/task/{_thread.get_native_id()}/schedstat"
        self._times = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._not_waiting, self._waited = self._asleep(), 0
        self._counts = False
        fields[page.WAITING], fields[page.MEASURED] = page.NONE, 1

    def _asleep(self) -> int:
        """Return for how long the thread has slept, from any beginning, in nanoseconds."""
        # The time that the thread has run, and waited for a processor (kernel, scheduler/sched-stats.rst).
        run, ready = os.pread(self._times, 64, 0).split()[:2]
        return time.monotonic_ns() - int(run) - int(ready)

    def note(self) -> None:
        """Write how long the thread has waited until now."""
        self._waited = max(0, self._asleep() - self._not_waiting)
        self._fields[page.WAITING] = page.NONE if is_on_gpu() else self._waited

    @contextlib.contextmanager
    def counts(self, use: int) -> Iterator[None]:
        """Have the time in a with block count as a use, a field of the page.

        A block within another one does not count, nor one of another thread.
        """
        if self._counts or self._thread != _thread.get_ident():
            yield
            return
        self._counts = True
        begin, asleep = time.monotonic_ns(), self._asleep()
        try:
            yield
        finally:
            self._counts = False
            self._fields[use] += time.monotonic_ns() - begin
            self._not_waiting += self._asleep() - asleep

    def saved(self, nanoseconds: int) -> None:
        """Count the time until now, from shortly after the last `note`, as saving."""
        if self._thread == _thread.get_ident():
            self._fields[page.SAVING] += nanoseconds
            self._not_waiting = self._asleep() - self._waited


class WorkerControl:
    """The control page of a worker, used by one thread.

    Args:
        pause: Waits for a number of seconds; called repeatedly while the agents agree on a stop step.
        shield: See `shield`. Called at the first boundary, when the script has set its
            signal handlers, and when a stop is near. None for no shield.
    """

    __slots__ = ("_boundary", "_due", "_fields", "_meter", "_pause", "_shield", "stopped")

    def __init__(
        self,
        fields: page.Fields,
        pause: Callable[[float], None] = time.sleep,
        shield: Callable[[], bool] | None = None,
    ) -> None:
        self._fields, self._pause, self._shield = fields, pause, shield
        self._boundary = 0
        self.stopped: Stop | None = None
        """The stop that `ask` has returned; None before."""
        self._meter: TimeMeter | None = None
        self._due = _NEVER
        fields[page.REGISTERED] = page.register()
        fields[page.ATTACHED] = 1

    def ask(self, step: int | None = None) -> Stop | None:
        """Count a boundary and return the answer of :func:`slurm_elastic.trainer.should_stop`.

        Raises TypeError if the step is no whole number, ValueError if it does not fit into 64 bits.
        """
        if self.stopped is not None:
            return self.stopped
        fields = self._fields
        if step is not None:
            fields[page.STEP] = step
        self._boundary = boundary = self._boundary + 1
        fields[page.BOUNDARY_TIME] = now = time.monotonic_ns()
        fields[page.BOUNDARY] = boundary
        # A memory barrier has to stand between these two lines. The agent executes it, see Agreement.hold.
        if fields[page.HOLD]:
            return self._wait(boundary)
        if now >= self._due and self._meter is not None:
            self._due = now + _MEASURE_INTERVAL_NS
            self._meter.note()
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
            while not (stop := fields[page.STOP]):
                if not fields[page.HOLD]:
                    return None
                self._pause(_POLL)
        except BaseException:
            # A signal handler of the script has raised. This call gets no answer, so it does not count.
            self._boundary -= 1
            raise
        if boundary < stop:
            return None
        self.stopped = Stop(fields)
        fields[page.STOPPED] = boundary
        return self.stopped

    def measure(self) -> None:
        """Measure the time of the calling thread from now on, and have a thread answer the agent, see `answers`.

        Does nothing where the environment has ``SLURM_ELASTIC_TIME_USE=off``; without a kernel that tells the times of
        threads nothing is measured.
        """
        if os.environ.get(SWITCH) == "off":
            return
        from slurm_elastic.control.answers import start

        start(self._fields)
        with contextlib.suppress(OSError):
            self._meter, self._due = TimeMeter(self._fields), 0

    def time_counts(self, use: str) -> AbstractContextManager[None]:
        """Have the time in a with block count as ``loading``, ``saving`` or ``restoring``, if it is measured."""
        return contextlib.nullcontext() if self._meter is None else self._meter.counts(_USES[use])

    def await_first(self, *, by_script: bool) -> None:
        """Note who comes to the first boundary: the script itself, which may forget it, or a loop or a framework."""
        self._fields[page.AWAITED] = time.monotonic_ns() if by_script else 0

    def _note_first(self) -> None:
        self._fields[page.FIRST_STEP] = self._fields[page.STEP]
        for field, use in zip(page.FIRST_USES, page.USES, strict=True):
            self._fields[field] = self._fields[use]
        self._fields[page.FIRST_TIME] = self._fields[page.BOUNDARY_TIME]

    def _raise_shield(self) -> None:
        if self._shield is not None:
            self._fields[page.SHIELDED] = int(self._shield())

    def report_checkpoint(self, step: int) -> None:
        """Report that the checkpoint of a step is in place; raises as `ask`."""
        self._fields[page.CHECKPOINT] = step
        if self._boundary:
            # A script saves between two boundaries, and reports when it has saved.
            self._fields[page.SAVE_TIME] = spent = time.monotonic_ns() - self._fields[page.BOUNDARY_TIME]
            if self._meter is not None:
                self._meter.saved(spent)

    def record_samples(self, epoch: int, samples: Iterable[int]) -> None:
        """Note the samples that this worker has trained on; only a rehearsal writes them down."""

    def report(self, step: int, loss: float) -> None:
        """Report the loss of a step; raises as `ask`. The agent may read a new loss with the step of the one before."""
        self._fields[page.LOSS] = page.float_bits(loss)
        self._fields[page.LOSS_STEP] = step

    @property
    def fenced(self) -> bool:
        """True if the agent has said that another group of workers may be training."""
        return bool(self._fields[page.FENCED])


def attach(environ: Mapping[str, str], shield: Callable[[], bool] | None = None) -> WorkerControl | None:
    """Take the control page that the environment names; None if it names none, or if another process has taken it.

    The first process that attaches removes the file, so that no other one can: a worker, or a program that a wrapper
    script starts, but no child of the trainer, such as a process of a data loader. See `WorkerControl` for `shield`.
    """
    path = environ.get(VARIABLE)
    if not path:
        return None
    try:
        fields = page.map_page(path)
        os.unlink(path)  # noqa: PTH108 (pathlib takes milliseconds to import)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        import logging

        logging.getLogger("slurm_elastic").warning("this worker cannot be told to stop at a step: %s", error)
        return None
    if environ.get(RECORDING):
        from slurm_elastic.control._recording import RecordedControl

        return RecordedControl(fields, environ, shield)
    return WorkerControl(fields, shield=shield)


def is_superseded(environ: Mapping[str, str]) -> bool:
    """Look in the run directory for a newer round, or a newer term, than that of the worker with this environment.

    A leader transfers its leadership when no agent has workers, so no worker of a current group finds a newer term.
    Records whose names the environment does not give are not read. True also if the run directory cannot be read, with
    a warning.
    """
    run_dir, round_ = environ.get("SLURM_ELASTIC_RUN_DIR"), _number(environ, "SLURM_ELASTIC_ROUND")
    if not run_dir or round_ is None:
        return False
    # Imported here: pathlib takes longer than the rest of this package, and only checkpoints need it.
    from pathlib import Path

    from slurm_elastic.rundir import RunDir, RunDirError

    directory = RunDir(Path(run_dir), environ.get("SLURM_ELASTIC_RUN_ID", ""))
    incarnation = environ.get("SLURM_ELASTIC_SCOPE")
    # Agents of earlier releases give the older name only.
    term = _number(environ, "SLURM_ELASTIC_TERM")
    term = _number(environ, "SLURM_ELASTIC_EPOCH") if term is None else term
    try:
        last = directory.newest("rounds")
        if last is not None and last > round_:
            return True
        newest = directory.newest("epochs", incarnation) if incarnation and term is not None else None
        return newest is not None and term is not None and newest > term
    except RunDirError as error:
        import logging

        logging.getLogger("slurm_elastic").warning(
            "no checkpoint is published, because it is unknown whether a newer group of workers trains: %s", error
        )
        return True


def _number(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ.get(name, ""))
    except ValueError:
        return None


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
