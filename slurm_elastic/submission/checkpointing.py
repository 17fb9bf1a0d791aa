"""Support of ``checkpoint()`` of a submitted callable, which returns the payload of the next start.

submitit calls `checkpoint()` in a signal handler on rank 0 (submitit/core/job_environment.py, 1.5.4), and callables
rely on that. Here the agent sends the signal when a planned end of the round is announced (--worker-signal), so never
to a group that a lost node or a failed worker has broken. A function that uses slurm_elastic.trainer learns of the stop
by `should_stop` instead, and `checkpoint()` is called after the function has returned.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType, ModuleType
from typing import Any

import cloudpickle
from submitit.core import utils

from slurm_elastic.control import is_superseded
from slurm_elastic.rundir import publish_file

SIGNAL = signal.SIGHUP
"""The signal that agents send to workers. Nothing else sends it: Slurm's warning before the time limit is SIGUSR2,
which reaches workers, too, under proctrack/linuxproc, before it is decided whether the round ends."""


def is_checkpointable(function: object) -> bool:
    """Return True if submitit would call the function's `checkpoint()` (submitit/core/utils.py, 1.5.4)."""
    return any(callable(getattr(function, name, None)) for name in ("__submitit_checkpoint__", "checkpoint"))


class Checkpointing:
    """Replaces the payload of this worker's job by its checkpoint when the round ends as planned.

    Args:
        submission: The payload that is about to run.
        paths: submitit's paths of the job and this rank.
    """

    def __init__(self, submission: utils.DelayedSubmission, paths: utils.JobPaths) -> None:
        self._submission, self._paths = submission, paths
        self._pid = os.getpid()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: save, and exit."""
        # The agent signals the whole process group; a forked process, as of a data loader, has this handler, too.
        if os.getpid() != self._pid or _uses_trainer():
            return
        code = 0
        try:
            self.save()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # The signal has interrupted the function, of which nothing must run any more.
        os._exit(code)

    def save(self) -> None:
        """Replace the payload by the result of `checkpoint()`, on rank 0; None keeps the payload.

        Raises:
            RuntimeError: Another group of workers may be training this run already; the payload stays.
        """
        if self._paths.task_id != 0:
            return
        following = self._submission._checkpoint_function()
        if following is not None:
            following.set_timeout(self._submission._timeout_min, self._submission._timeout_countdown)
            content = cloudpickle.dumps(following)
            # This node may have been paused here while another group of workers went on.
            if is_superseded(os.environ):
                raise RuntimeError("another group of workers has taken over this run; its payload stays")
            publish_file(self._paths.submitted_pickle, content)


def is_stopping() -> bool:
    """Return True if `trainer.should_stop` has told the function to save and exit."""
    trainer = _trainer()
    return trainer is not None and trainer.stopped() is not None


def _uses_trainer() -> bool:
    trainer = _trainer()
    return trainer is not None and trainer.is_managed()


def _trainer() -> Any:
    module: ModuleType | None = sys.modules.get("slurm_elastic.trainer")
    return module
