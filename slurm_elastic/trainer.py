"""The API for training scripts: when to stop, whether to publish a checkpoint, how far the training is.

Under plain python and torchrun every function here does nothing. Import the module at the top of the script: from then
on the agent expects that the worker calls `should_stop`, as docs/howto/trainer.md shows. A script that never calls it
should not import the module.

Older names stay valid: `takes_part` for `is_managed`, `checkpointed` for `report_checkpoint`, `may_publish` for
`can_publish_checkpoint`.
"""

from __future__ import annotations

import operator
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

from slurm_elastic.control.worker_side import Stop, StopReason, WorkerControl, attach, is_superseded, shield, unshield

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import TypeVar

    _Batch = TypeVar("_Batch")

__all__ = [
    "StartInfo",
    "Stop",
    "StopReason",
    "can_publish_checkpoint",
    "checkpointed",
    "expires",
    "is_managed",
    "loading",
    "may_publish",
    "record_samples",
    "report",
    "report_checkpoint",
    "should_stop",
    "start_info",
    "stopped",
    "takes_part",
]


class StartInfo(NamedTuple):
    """The reason and the place of a worker's start.

    Attributes:
        reason: start, requeued, node_joined, node_left, node_lost or worker_failed.
        round: Number of the round: how many rounds the run had before this one.
        resumes: True if the run has trained before. Then there is a checkpoint, unless the run was too short for one.
        run_id: Id of the run; empty outside of a run, as are the next two.
        run_dir: Directory of the run, on a file system that all its nodes share.
        node: Slurm's name of this node.
    """

    reason: str
    round: int
    resumes: bool
    run_id: str
    run_dir: str
    node: str


def should_stop(step: int | None = None) -> Stop | None:
    """Return whether to save a checkpoint and exit now; call this after every step.

    All ranks get the same answer after the same call. So every rank has to call this equally often, at places where all
    ranks can save together. A call takes less than a microsecond. When a stop is near, one call waits for milliseconds
    until the agents have agreed on the step.

    Args:
        step: The script's own count of steps so far; status and metrics show it.

    Returns:
        None to go on. A Stop to save and exit with 0, from then on the same in every call; the run goes on from that
        checkpoint.

    Raises:
        TypeError: The step is no whole number.
        ValueError: The step does not fit into 64 bits.
    """
    control = _control or _look()
    if control is None:
        if step is not None:
            operator.index(step)
        return None
    return control.ask(step)


def record_samples(epoch: int, samples: Iterable[int]) -> None:
    """Tell a rehearsal which samples this rank has trained on since its last step; otherwise this does nothing.

    `slurm_elastic.data.ElasticSampler` calls this function; a script that uses it need not.

    Args:
        epoch: The script's own count of epochs.
        samples: Numbers of the samples, as the data set counts them.
    """
    if _control is not None:
        _control.record_samples(epoch, samples)


def stopped() -> Stop | None:
    """Return the last answer of `should_stop`; this counts as no call."""
    return None if _control is None else _control.stopped


def is_managed() -> bool:
    """Return True if an agent runs this worker and expects it to call `should_stop`."""
    return _look() is not None


def report(step: int, *, loss: SupportsFloat) -> None:
    """Report the loss of a step; status, health port and metrics show the last one.

    Report the loss of the whole group if the script has it: that of one rank is the loss of its own samples, which are
    others when the number of ranks changes.

    Args:
        step: The script's own count of steps.
        loss: A number, or a tensor with one element; the call waits for a tensor on a GPU.

    Raises:
        TypeError: The step is no whole number, or the loss is no number.
        ValueError: The step does not fit into 64 bits.
    """
    step = operator.index(step)
    if not hasattr(loss, "__float__"):
        raise TypeError(f"loss is a {type(loss).__name__}; give a number")
    control = _look()
    if control is not None:
        # torch warns of float() where gradients are recorded.
        item = getattr(loss, "item", None)
        control.report(step, float(loss if item is None else item()))


def loading(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Iterate over input, and have the time that it takes count as waiting for input; otherwise this does nothing.

    `ElasticState.batches` does the same.

    Args:
        batches: The input; iterated over once.
    """
    with _time_counts("loading"):
        iterator = iter(batches)
    while True:
        with _time_counts("loading"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def report_checkpoint(step: int) -> None:
    """Report that the checkpoint of a step is in place.

    A job that is started again and again without a new checkpoint is not requeued for ever.

    Args:
        step: The script's own count of steps.

    Raises:
        TypeError: The step is no whole number.
        ValueError: The step does not fit into 64 bits.
    """
    step = operator.index(step)
    control = _look()
    if control is not None:
        control.report_checkpoint(step)


def can_publish_checkpoint() -> bool:
    """Return whether a new checkpoint may get its final name; call this right before that, on the rank that renames.

    The call reads the run directory.

    Returns:
        False if another group of workers may be training this run already, because this node was cut off or paused, or
        if the run directory cannot be read. Then keep the checkpoint that is there, and exit.
    """
    control = _look()
    if control is not None and control.fenced:
        return False
    # The agent may fence this worker while a slow file system is read.
    return not is_superseded(os.environ) and not (control is not None and control.fenced)


def expires(after: float, scope: str = "block") -> AbstractContextManager[None]:
    """Guard a block by the watchdog: it records the stacks of a worker that takes longer, and kills the worker.

    This is torch.distributed.elastic.timer.expires with the client of this node. Without a watchdog it does nothing.

    Args:
        after: Seconds that the block may take.
        scope: Name of the block in reports; blocks of one process that overlap need different names.
    """
    path = os.environ.get("TORCHELASTIC_TIMER_FILE")
    if not path:
        return nullcontext()
    from torch.distributed.elastic.timer import api, file_based_local_timer

    return api.expires(after, scope, file_based_local_timer.FileTimerClient(path))


def start_info() -> StartInfo:
    """Return why and where this worker was started; outside of a run, a first start."""
    reason = os.environ.get("SLURM_ELASTIC_REASON", "start")
    number = os.environ.get("SLURM_ELASTIC_ROUND", "")
    round_ = int(number) if number.isdecimal() else 0
    return StartInfo(
        reason=reason,
        round=round_,
        resumes=round_ > 0 or reason == "requeued",
        run_id=os.environ.get("SLURM_ELASTIC_RUN_ID", ""),
        run_dir=os.environ.get("SLURM_ELASTIC_RUN_DIR", ""),
        node=os.environ.get("SLURM_ELASTIC_NODE", ""),
    )


_control: WorkerControl | None = None
_looked = False


def _look() -> WorkerControl | None:
    global _control, _looked
    if not _looked:
        _looked = True
        _control = attach(os.environ, shield)
        if _control is not None:
            _control.measure()
            _control.await_first(by_script=True)
    return _control


def _time_counts(use: str) -> AbstractContextManager[None]:
    """Have the time in a with block count as a use of this worker's time, see `WorkerControl.time_counts`."""
    control = _look()
    return nullcontext() if control is None else control.time_counts(use)


def _await_first(*, by_script: bool) -> None:
    """Note whether the script itself has to call `should_stop`, from now on: the agent says so if it does not."""
    control = _look()
    if control is not None:
        control.await_first(by_script=by_script)


def _forget() -> None:
    """Detach a forked process from the page of the worker that it was forked from.

    Such a process is no worker, as one of a data loader, or becomes a worker now, as after a warm start; then it finds
    a page of its own.
    """
    global _control, _looked
    _control, _looked = None, False
    unshield()


os.register_at_fork(after_in_child=_forget)
_look()

# Older names, which training scripts use.
takes_part = is_managed
checkpointed = report_checkpoint
may_publish = can_publish_checkpoint
