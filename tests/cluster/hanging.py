"""A training whose rank 2 hangs in its tenth step of round 0, when the others are in the next collective.

Writes `hung_at` when it does, and a line to `trained/<round>.<rank>` for every step; ends when there is `enough`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from slurm_elastic import trainer

round_, rank = int(os.environ["SLURM_ELASTIC_ROUND"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
Path("trained").mkdir(exist_ok=True)
step = 0
with Path(f"trained/{round_}.{rank}").open("w", buffering=1) as log:
    while True:
        time.sleep(0.05)
        enough = torch.tensor(float(Path("enough").exists()))
        dist.all_reduce(enough)
        step += 1
        if (round_, rank, step) == (0, 2, 10):
            Path("hung_at").write_text(str(time.time()))
            while True:
                time.sleep(60)
        log.write(f"{time.time()}\n")
        trainer.should_stop(step)
        if enough > 0:
            break
dist.barrier()
# The end of an interpreter takes seconds on a busy machine, which would be no step either.
os._exit(0)
