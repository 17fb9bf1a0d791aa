"""A training script that hangs in round 0 on rank 1, under a timer of torch's, and waits for ``finish`` otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.distributed.elastic import timer

Path(f"pipe.{os.environ['RANK']}").write_text(os.environ["TORCHELASTIC_TIMER_FILE"])
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
if (os.environ["SLURM_ELASTIC_ROUND"], os.environ["RANK"]) == ("0", "1"):
    with timer.expires(after=0.2, scope="step"):
        while True:
            time.sleep(60)
while not Path("finish").exists():
    with timer.expires(after=60, scope="step"):
        time.sleep(0.02)
