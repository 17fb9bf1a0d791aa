"""``checkpoint()`` of a submitted callable: what is called at the next start, in place of what was submitted.

submitit calls it in a signal handler, on rank 0 (submitit/core/job_environment.py, 1.5.4), and that is how callables
are written that have it. Here a worker gets the signal when its agent knows of a planned end of the round
(--worker-signal), so never in a group that a lost node or a failed worker has broken. A function that asks
slurm_elastic.trainer is told at a step instead, and `checkpoint()` is called when it has returned.
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

__all__ = ["SIGNAL", "Checkpointing", "is_checkpointable", "told_to_stop"]

SIGNAL = signal.SIGHUP
"""What the agents send. Nothing else sends it to a worker: Slurm warns of the time limit by SIGUSR2, under
proctrack/linuxproc also the workers themselves, and then it is not yet decided whether the round ends."""


def is_checkpointable(function: object) -> bool:
    """Whether submitit would call it for a checkpoint (submitit/core/utils.py, 1.5.4)."""
    return any(callable(getattr(function, name, None)) for name in ("__submitit_checkpoint__", "checkpoint"))


class Checkpointing:
    """Saves the submission of this worker when the round ends as planned.

    Args:
        submission: that is about to run.
        paths: of the job and this rank.
    """

    def __init__(self, submission: utils.DelayedSubmission, paths: utils.JobPaths) -> None:
        self._submission, self._paths = submission, paths
        self._pid = os.getpid()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: save, and end this worker."""
        # The agent signals the whole process group; a forked process, as of a data loader, has this handler too.
        if os.getpid() != self._pid or _asks_trainer():
            return
        code = 0
        try:
            self.save()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # The function is somewhere in the middle; nothing of it shall run any more.
        os._exit(code)

    def save(self) -> None:
        """On rank 0: put what `checkpoint()` returns in the place of the submission. None leaves it as it is.

        Raises:
            RuntimeError: another group of workers may train this run already; what there is stays.
        """
        if self._paths.task_id != 0:
            return
        following = self._submission._checkpoint_function()
        if following is not None:
            following.set_timeout(self._submission._timeout_min, self._submission._timeout_countdown)
            content = cloudpickle.dumps(following)
            # A node that was paused here may wake up when another group has long gone on.
            if is_superseded(os.environ):
                raise RuntimeError("another group of workers has taken over this run; what it has submitted stays")
            publish_file(self._paths.submitted_pickle, content)


def told_to_stop() -> bool:
    """Whether the function has been told by slurm_elastic.trainer to save and end."""
    trainer = _trainer()
    return trainer is not None and trainer.stopped() is not None


def _asks_trainer() -> bool:
    trainer = _trainer()
    return trainer is not None and trainer.is_managed()


def _trainer() -> Any:
    module: ModuleType | None = sys.modules.get("slurm_elastic.trainer")
    return module
