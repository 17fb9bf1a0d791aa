"""The control page of a worker in a rehearsal: it writes down what the worker does, and stops it where a mishap is due.

`slurm_elastic.rehearsal` names a directory in the environment. Outside of a rehearsal this module is not imported.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

from slurm_elastic.control.shared_page import BOUNDARY_TIME, HOLD, Fields, write_text
from slurm_elastic.control.worker_side import RECORDING, Stop, StopReason, WorkerControl

_POLL = 0.001
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class RecordedControl(WorkerControl):
    """A control page whose calls are written down, one JSON object per line: docs/rehearse.md has the schema.

    The directory that SLURM_ELASTIC_REHEARSAL names has the file ``mishaps.json`` with the steps of all mishaps, in
    ascending order. At such a step a worker waits until the file ``done.<index>`` is there, or until its agent wants it
    to wait for a stop step. If the file ``save.<index>`` names its node, the worker was paused meanwhile and another
    group has taken its place; it is told to stop, so that the script saves.
    """

    __slots__ = ("_descriptor", "_directory", "_mishaps", "_next", "_node")

    def __init__(self, fields: Fields, environ: Mapping[str, str], shield: Callable[[], bool] | None) -> None:
        super().__init__(fields, shield=shield)
        self._directory = environ[RECORDING]
        self._mishaps: list[int] = json.loads(Path(self._directory, "mishaps.json").read_text())
        self._next, self._node = 0, environ.get("SLURM_ELASTIC_NODE", "")
        number, rank = environ.get("SLURM_ELASTIC_ROUND", "0"), environ.get("RANK", "0")
        path = os.path.join(self._directory, f"{int(number):06d}.{int(rank):06d}.jsonl")  # noqa: PTH118
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._add(
            "begins",
            round=int(number),
            rank=int(rank),
            node=self._node,
            world_size=int(environ.get("WORLD_SIZE", "1")),
            pid=os.getpid(),
        )
        atexit.register(self._end, os.getpid())

    def ask(self, step: int | None = None) -> Stop | None:
        """See base class."""
        if self.stopped is not None:
            return self.stopped
        self._add("step", step=step, place=_place())
        if self._await_mishaps(step):
            self._add("wakes", step=step)
            write_text(self._fields, StopReason.PREEMPTED)
            self.stopped = Stop(self._fields)
            return self.stopped
        stop = super().ask(step)
        if stop is not None:
            self._add("stop", step=step, reason=str(stop.reason), seconds_left=stop.seconds_left, place=_place())
        return stop

    def report(self, step: int, loss: float) -> None:
        """See base class."""
        super().report(step, loss)
        self._add("loss", step=step, loss=loss, place=_place())

    def report_checkpoint(self, step: int) -> None:
        """See base class."""
        super().report_checkpoint(step)
        self._add("checkpoint", step=step, place=_place())

    def record_samples(self, epoch: int, samples: Iterable[int]) -> None:
        """Write down the samples that this worker has trained on in the present step."""
        self._add("samples", epoch=epoch, samples=[int(sample) for sample in samples])

    def _await_mishaps(self, step: int | None) -> bool:
        """Wait until the mishaps that are due have happened; return True if one has paused this worker."""
        while step is not None and self._next < len(self._mishaps) and step >= self._mishaps[self._next]:
            done = f"{self._directory}/done.{self._next}"
            if not os.path.exists(done):  # noqa: PTH110
                self._add("waits", mishap=self._next, step=step)
                while not os.path.exists(done):  # noqa: PTH110
                    if self._fields[HOLD]:
                        self._add("goes_on", step=step)
                        return False
                    # For --hang-timeout this is no hang.
                    self._fields[BOUNDARY_TIME] = time.monotonic_ns()
                    time.sleep(_POLL)
                self._add("goes_on", step=step)
                if self._was_paused(self._next):
                    return True
            self._next += 1
        return False

    def _was_paused(self, mishap: int) -> bool:
        try:
            return Path(self._directory, f"save.{mishap}").read_text() == self._node
        except FileNotFoundError:
            return False

    def _end(self, pid: int) -> None:
        if os.getpid() == pid:
            self._add("ends")

    def _add(self, event: str, **fields: object) -> None:
        os.write(self._descriptor, json.dumps({"at": time.monotonic(), "event": event, **fields}).encode() + b"\n")


def _place() -> str:
    """Return file and line of the innermost call in a file of the user; without one, outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    first = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            if "site-packages" not in file:
                return f"{file}:{frame.f_lineno}"
            first = first or f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return first
