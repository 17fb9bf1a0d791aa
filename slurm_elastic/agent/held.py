"""Elements of an array that Slurm itself holds: they come no more, and would stay in the queue when the run is over."""

from __future__ import annotations

from collections.abc import Callable

from slurm_elastic.slurm import Controller, SlurmJob

__all__ = ["cancel_held_elements"]

_HELD = "JobHoldMaxRequeue"
"""Slurm requeues a job whose nodes failed, but the fifth time it holds it (MaxBatchRequeue in slurm.conf(5);
job_mgr.c before 23.02). Only an operator of Slurm can release it, while its owner can cancel it."""


def cancel_held_elements(job: SlurmJob | None, controller: Controller, say: Callable[[str], None]) -> None:
    """Cancel the elements that Slurm holds; to be called when the run is finished, so that they have nothing to do.

    Those that a person holds are left alone.

    Args:
        job: of this agent; None outside Slurm.
        controller: to ask.
        say: takes one line for people.
    """
    if job is None or job.array is None:
        return
    array = job.array.job_id
    for view in controller.elements(array):
        if view.reason == _HELD:
            name = f"{array}_{view.array_task_id}"
            say(f"job {name} is held by Slurm ({_HELD}), as its nodes failed too often: the run is finished without it")
            controller.cancel(name)
