"""A replay leaves the garbage collector alone, which would search all that was imported again and again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPLAY = """\
import gc, sys
from slurm_elastic.agent.forkserver._import_plan import ImportPlan, ImportStep
from slurm_elastic.agent.forkserver._import_recorder import current_state
from slurm_elastic.agent.forkserver._import_replay import ImportReplay

plan = ImportPlan((ImportStep("colorsys"), ImportStep("wave")))
made, searches = [], []

def about_to(number):
    made.extend([number] for _ in range(10000))

replay = ImportReplay(plan, current_state(sys.path), about_to, low_priority=False)
gc.callbacks.append(lambda phase, info: searches.append(phase))
replay.run()
gc.callbacks.clear()
print(searches, gc.isenabled(), gc.get_freeze_count() > 20000, {"colorsys", "wave"} <= {*sys.modules})
"""


def test_no_garbage_is_collected_during_a_replay() -> None:
    """What was imported is frozen before the collector is on again."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    ended = subprocess.run(
        [sys.executable, "-c", REPLAY], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "[] True True True\n", ended.stderr
