"""What a replay does once, and not for each module: collections of garbage, and looks at a process without news."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


LOOKS = """\
import sys
from slurm_elastic.agent.forkserver import _import_replay
from slurm_elastic.agent.forkserver._import_plan import ImportPlan, ImportStep
from slurm_elastic.agent.forkserver._import_recorder import current_state

looks, threads = [], _import_replay.threads
_import_replay.threads = lambda: looks.append(1) or threads()
# wsgiref.handlers imports three modules of its package, and others.
plan = ImportPlan((ImportStep("colorsys"), ImportStep("wsgiref.handlers")))
replay = _import_replay.ImportReplay(
    plan, current_state(sys.path), lambda number: None, low_priority=False, check_modules=sys.argv[1] == "each"
)
before, modules = len(looks), {*sys.modules}
replay.run()
print(len(looks) - before, len({*sys.modules} - modules) > 4)
"""


@pytest.mark.parametrize("check_modules", [True, False])
def test_a_plan_that_was_tried_is_checked_after_each_step(*, check_modules: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", LOOKS, "each" if check_modules else "step"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    looks, several = ended.stdout.split()
    assert several == "True"
    assert int(looks) > 4 if check_modules else int(looks) == 2
