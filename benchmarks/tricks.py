"""What shortens the start of workers, and copies of the package that lack one of these things.

A copy is the package as it is, but for one place in its source: so no option of the product exists for the sake of
a benchmark, and every process that takes part in a start lacks the same.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "slurm_elastic"


@dataclass(frozen=True, slots=True)
class Trick:
    """One thing that is done for the sake of time, and where it lies in the source."""

    meaning: str
    file: str
    """Relative to the package."""
    source: str
    """Occurs there exactly once."""
    without: str
    """What stands in its place where the trick is not used."""


TRICKS = {
    "joint-import": Trick(
        "agent and fork server share one import of torch",
        "agent/forkserver/worker_command.py",
        'if program is FUNCTION:\n        return "--run-path"',
        'if True:\n        return "a benchmark"',
    ),
    "freeze": Trick(
        "collections in workers leave alone what the fork server has imported",
        "agent/forkserver/_server.py",
        "        importlib.invalidate_caches()\n        gc.freeze()\n",
        "        importlib.invalidate_caches()\n",
    ),
    "title": Trick(
        "ps shows the agent's own command line, and not the one that torch was imported with",
        "agent/forkserver/_shared_import.py",
        'set_title(" ".join(state["orig_argv"]), "SLURM_ELASTIC_WARM")',
        "pass",
    ),
}


def copy_without(name: str, directory: Path) -> None:
    """Copy the package into a directory, without one trick.

    Raises:
        ValueError: the source has changed, so that the trick is not found where it is said to be.
    """
    trick = TRICKS[name]
    copied = directory / _PACKAGE.name
    shutil.copytree(_PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    file = copied / trick.file
    source = file.read_text()
    if source.count(trick.source) != 1:
        raise ValueError(f"{trick.file} does not have this exactly once: {trick.source!r}")
    file.write_text(source.replace(trick.source, trick.without))
