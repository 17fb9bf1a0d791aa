"""What a training script may ask and tell: when to stop, whether to publish, how far it is.

::

    from slurm_elastic import trainer

    for batch in batches:
        ...
        step += 1
        if trainer.should_stop(step):
            save_checkpoint()
            break

Everything here does nothing under plain python and torchrun. Import it at the top of the script: from then on the agent
counts on this worker to ask. A script that does not ask should not import it.
"""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, NamedTuple

from slurm_elastic.control import Stop, WorkerControl, attach, is_superseded, shield, unshield

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "StartInfo",
    "Stop",
    "checkpointed",
    "expires",
    "may_publish",
    "should_stop",
    "start_info",
    "stopped",
    "takes_part",
]


class StartInfo(NamedTuple):
    """Why and where this worker was started.

    Attributes:
        reason: start, requeued, node_joined, node_left, node_lost or worker_failed.
        round: how many times the group was put together before, over the whole run.
        resumes: whether the run was started before; then there is a checkpoint, unless it was too short for one.
        run_id: of the run; empty outside of a run, as are the next two.
        run_dir: the run's directory, on a disk that all its nodes share.
        node: Slurm's name of this node.
    """

    reason: str
    round: int
    resumes: bool
    run_id: str
    run_dir: str
    node: str


def should_stop(step: int | None = None) -> Stop | None:
    """Ask after every step whether to save a checkpoint and end now.

    All ranks get the same answer after the same step. So every rank has to ask equally often, at places where all of
    them can save together. It takes less than a microsecond. When a stop is near it waits, once and for milliseconds,
    until the agents have agreed on the step.

    Args:
        step: how many steps were taken so far by the script's own count, for those who watch the run.

    Returns:
        None, or why to stop; and from then on always that. Save, and end with 0: the run goes on from this checkpoint.

    Raises:
        TypeError: the step is no whole number.
        ValueError: it does not fit into 64 bits.
    """
    control = _control or _look()
    if control is None:
        if step is not None:
            operator.index(step)
        return None
    return control.ask(step)


def stopped() -> Stop | None:
    """Return what `should_stop` has answered last, without asking: None, or why to stop."""
    return None if _control is None else _control.stopped


def takes_part() -> bool:
    """Return whether an agent counts on this worker to ask."""
    return _look() is not None


def checkpointed(step: int) -> None:
    """Tell that a checkpoint of this step is in place.

    Raises:
        TypeError: the step is no whole number.
        ValueError: it does not fit into 64 bits.
    """
    step = operator.index(step)
    control = _look()
    if control is not None:
        control.checkpointed(step)


def may_publish() -> bool:
    """Ask right before a new checkpoint gets its final name, on the rank that does it. May read the run directory.

    Returns:
        False if another group of workers may be training this run already, as this node was cut off or paused, or if
        the run directory cannot be read. Then leave the checkpoint that is there, and end.
    """
    control = _look()
    if control is not None and control.fenced:
        return False
    # The agent's word may come while a slow file system is asked.
    return not is_superseded(os.environ) and not (control is not None and control.fenced)


def expires(after: float, scope: str = "block") -> AbstractContextManager[None]:
    """Guard a block by the watchdog: a worker that takes longer hangs, and is killed after its stacks were kept.

    ::

        with trainer.expires(after=60, scope="step"):
            ...

    This is torch.distributed.elastic.timer.expires with the client of this node. Without a watchdog it does nothing.

    Args:
        after: seconds.
        scope: a name for reports; blocks of one process that overlap need different ones.
    """
    path = os.environ.get("TORCHELASTIC_TIMER_FILE")
    if not path:
        from contextlib import nullcontext

        return nullcontext()
    from torch.distributed.elastic.timer import api, file_based_local_timer

    return api.expires(after, scope, file_based_local_timer.FileTimerClient(path))


def start_info() -> StartInfo:
    """Tell why this worker was started; outside of a run, that it is the first start."""
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
    return _control


def _forget() -> None:
    """In a forked process: it is no worker, as a process of a data loader, or one only now, as after a warm start.

    It may look again: the page of the worker that it comes from is taken.
    """
    global _control, _looked
    _control, _looked = None, False
    unshield()


os.register_at_fork(after_in_child=_forget)
_look()
