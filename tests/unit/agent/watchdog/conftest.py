from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.agent.watchdog.stalls import HangTimeout
from slurm_elastic.agent.watchdog.timers import make_pipe
from slurm_elastic.agent.watchdog.watchdog import Watchdog

Make = Callable[[HangTimeout | None], Watchdog]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes watchdogs whose threads do not run."""
    made: list[Watchdog] = []

    def make_watchdog(timeout: HangTimeout | None) -> Watchdog:
        pipe = make_pipe({"TORCHELASTIC_TIMER_FILE": str(tmp_path / str(len(made)))}, tmp_path)
        made.append(Watchdog(pipe, lambda _hang: None, timeout, 60.0))
        return made[-1]

    yield make_watchdog
    for each in made:
        each.stop()
