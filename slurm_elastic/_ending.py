"""Ends a worker that was told to stop, when all ranks have saved; who saves and stops in a process is noted here."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurm_elastic import trainer

__all__ = ["claim", "end_worker", "wait_for_all"]

_TIMEOUT = timedelta(minutes=30)
"""For ranks that still save; the time after which torch gives up a collective."""
_KEY = "slurm_elastic/end"


_claimed = ""


def claim(owner: str) -> None:
    """Note what saves and stops in this process: a second one would count the steps twice.

    Raises:
        RuntimeError: There is another one.
    """
    global _claimed
    if "ElasticState" in (owner, _claimed) and _claimed:
        raise RuntimeError(
            f"this process has an {_claimed} and gets an {owner}: one object counts, saves and stops; give it all state"
        )
    _claimed = owner
    trainer._await_first(by_script=False)


def end_worker() -> None:
    """End this process with 0, when all ranks are here: rank 0 has written its checkpoint by then.

    What the script does after its training, such as an evaluation, is left to the round that finishes it.

    Raises:
        SystemExit: always.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            wait_for_all(_KEY, dist.get_world_size(), _TIMEOUT)
        # Not now: on its way out a framework still uses its models (lightning 2.6, DDPStrategy.teardown).
        atexit.register(_end_process_group)
    sys.exit(0)


def wait_for_all(key: str, world_size: int, timeout: timedelta) -> None:
    """Wait at the store of the round until all ranks are here.

    `dist.barrier` would do, but it holds on to the tensors of the collective before, see `_end_process_group`.

    Args:
        key: Of the place where they meet, once in a round.
        world_size: Number of ranks.
        timeout: To wait.

    Raises:
        DistError: The time is over, or there is no store.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    # A round has a store of its own.
    if store.add(key, 1) == world_size:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timeout)


def _end_process_group() -> None:
    """End the process group without waiting for gloo's threads with the GIL: no DistributedDataParallel keeps it.

    gloo's thread needs the GIL to free the tensors of its last collective, and ~ProcessGroupGloo waits for that thread.
    The last Python reference to a process group releases the GIL for that (IntrusivePtrNoGilDestructor), but a Reducer
    that owns it last does not (~Reducer, seen in torch 2.13): where the thread gets no processor until then, the worker
    hangs at its end.
    """
    for each in gc.get_objects():
        # isinstance would ask proxy objects for their class.
        if issubclass(type(each), DistributedDataParallel):
            # The logger owns the reducer, too.
            each.logger = each.reducer = each.process_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
