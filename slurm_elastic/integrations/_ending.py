"""The end of a worker that was told to stop, when the framework has saved."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist

__all__ = ["end_worker"]

_TIMEOUT = timedelta(minutes=30)
"""For ranks that still save; the time after which torch gives up a collective."""
_KEY = "slurm_elastic/end"


def end_worker() -> None:
    """End this process with 0, when all ranks are here: rank 0 has written its checkpoint by then.

    What the script does after its training, such as an evaluation, is left to the round that finishes it.

    Raises:
        SystemExit: always.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            _wait_for_all()
        dist.destroy_process_group()
    sys.exit(0)


def _wait_for_all() -> None:
    """Wait at the store of the round until all ranks are here.

    After `dist.barrier` a process can hang at its end, with gloo in torch 2.13: gloo's thread destroys tensors of the
    collective before, for which it needs the GIL, while this thread frees a DistributedDataParallel, whose Reducer owns
    the process group, and waits with the GIL for that thread (~ProcessGroupGloo).
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=_TIMEOUT,
        wait_for_workers=False,
    )
    # A round has a store of its own.
    if store.add(_KEY, 1) == dist.get_world_size():
        store.set(f"{_KEY}/all", "")
    store.wait([f"{_KEY}/all"], _TIMEOUT)
