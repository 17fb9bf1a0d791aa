"""A training whose rank 2 hangs in round 0 when there is `hang`, while the others go on to the next collective.

Writes the number of its steps before that to `hung_after`, and a line to `trained/<round>.<rank>` for every step; ends
when there is `enough`.
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
        if (round_, rank) == (0, 2) and step >= 10 and Path("hang").exists():
            Path("hung_after").write_text(str(step - 1))
            while True:
                time.sleep(60)
        log.write(f"{time.time()}\n")
        trainer.should_stop(step)
        if enough > 0:
            break
dist.barrier()
# The end of an interpreter takes seconds on a busy machine, which would be no step either.
os._exit(0)
