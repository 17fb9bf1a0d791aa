"""Late files and late looks: `pytest --late SEED`, for races that a quick machine hides.

Each file of a run directory comes up to 0.5 s late, as on a slow file system, each look of a test up to 0.6 s.
The sitecustomize in `HOOK` delays the processes that have `environment`. No time-out of a test or of the product is
another one.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

VARIABLE = "SLURM_ELASTIC_TEST_LATE"
LOOK = 0.6
HOOK = Path(__file__).with_name("hook")
"""The directory with the sitecustomize."""

_random = random.Random(os.environ.get(VARIABLE))


def environment(path: str = "") -> dict[str, str]:
    """Variables for processes whose PYTHONPATH is this; none if files are not late."""
    seed = os.environ.get(VARIABLE)
    return {} if seed is None else {VARIABLE: seed, "PYTHONPATH": os.pathsep.join(filter(None, (str(HOOK), path)))}


def look() -> None:
    """Called before a test looks at what other processes do."""
    if VARIABLE in os.environ:
        time.sleep(_random.uniform(0, LOOK))
