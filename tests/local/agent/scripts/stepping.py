"""A training script that takes steps until there is ``finish``; rank 1 takes five in round 0 and then hangs.

With the argument ``together`` rank 0 takes eight then and hangs too, under a timer.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from slurm_elastic import trainer

first_round, rank = os.environ["SLURM_ELASTIC_ROUND"] == "0", int(os.environ["RANK"])
step = 0
while not Path("finish").exists():
    time.sleep(0.02)
    step += 1
    trainer.should_stop(1000 + step)
    if first_round and rank == 1 and step == 5:
        Path("hangs").touch()
        while True:
            time.sleep(60)
    if first_round and rank == 0 and step >= 8 and "together" in sys.argv and Path("hangs").exists():
        with trainer.expires(after=0.2, scope="all_reduce"):
            while True:
                time.sleep(60)
