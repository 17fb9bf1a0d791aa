"""A seed names one schedule and one transcript, in whatever process it is played."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]


def transcripts(hash_seed: str) -> list[str]:
    """Those of a process in which strings have these hashes, and sets the order that follows from them."""
    command = [sys.executable, "-m", "tests.simulation.transcripts"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def test_a_schedule_is_the_same_whenever_and_wherever_it_is_played() -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(transcripts, ("1", "2"))
    different = next((pair for pair in zip_longest(one, other) if pair[0] != pair[1]), None)
    assert different is None
    for kind in ("membership", "leaders", "strike", "failure", "stop"):
        assert any(line.startswith(kind) for line in one)
