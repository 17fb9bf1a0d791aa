"""The end of a worker that was told to stop, when the framework has saved."""

from __future__ import annotations

import sys

import torch.distributed as dist

__all__ = ["end_worker"]


def end_worker() -> None:
    """End this process with 0, when all ranks are here: rank 0 has written its checkpoint by then.

    What the script does after its training, such as an evaluation, is left to the round that finishes it.

    Raises:
        SystemExit: always.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.exit(0)
