"""A training script that takes steps until there is ``finish``; rank 1 takes five in round 0 and then hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slurm_elastic import trainer

hangs = (os.environ["SLURM_ELASTIC_ROUND"], os.environ["RANK"]) == ("0", "1")
step = 0
while not Path("finish").exists():
    time.sleep(0.02)
    step += 1
    trainer.should_stop(1000 + step)
    if hangs and step == 5:
        Path("hangs").write_text(str(time.time()))
        while True:
            time.sleep(60)
