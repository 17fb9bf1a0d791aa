"""A training script that asks the trainer API after every step; rank 1 hangs in round 0 under a timer.

It writes what it sees to ``seen/<round>.<rank>.json``, as worker.py does. It ends well when there is ``finish``, and
with an error when there is ``fail``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from slurm_elastic import trainer

round_, rank = os.environ["SLURM_ELASTIC_ROUND"], os.environ["RANK"]
Path("seen").mkdir(exist_ok=True)
part = Path("seen") / f".{round_}.{rank}"
part.write_text(json.dumps({"env": dict(os.environ)}))
part.rename(Path("seen") / f"{round_}.{rank}.json")
print("trains", flush=True)
step = 0
while not Path("finish").exists():
    time.sleep(0.02)
    step += 1
    if Path("fail").exists():
        sys.exit(3)
    trainer.report(step, loss=1 / step)
    if trainer.should_stop(step):
        trainer.checkpointed(step)
        break
    if (round_, rank, step) == ("0", "1", 5):
        with trainer.expires(after=0.2, scope="step"):
            time.sleep(3600)
