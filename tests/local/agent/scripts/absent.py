"""A training script whose ranks add up a tensor in each step; in round 0, rank 1 does not come to the sixth sum.

With ``different`` as argument it begins another collective instead; with ``timeout`` sums have a time limit of 3 s;
with ``plain``, too, and the script does not use the trainer API. In later rounds it ends at once.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

if os.environ["SLURM_ELASTIC_ROUND"] != "0":
    sys.exit()

import torch
import torch.distributed


def load_batch() -> None:
    """Read a batch from a file system that hangs."""
    time.sleep(1000)


how = sys.argv[1] if len(sys.argv) > 1 else "absent"
if how != "plain":
    from slurm_elastic import trainer
else:
    assert not [name for name in sys.modules if name.startswith("slurm_elastic")]
limit = timedelta(seconds=3) if how in ("timeout", "plain") else timedelta(minutes=5)
torch.distributed.init_process_group("gloo", timeout=limit)
rank = torch.distributed.get_rank()
for step in range(8):
    if rank == 1 and step == 5:
        if how == "different":
            torch.distributed.broadcast(torch.ones(1), 0)
        load_batch()
    torch.distributed.all_reduce(torch.ones(1))
    if how != "plain":
        trainer.should_stop(step)
