"""A quick look at the agent's command line, without torch's parser, whose import takes a second or more.

For what has to be known before that: whether to start the process that workers are forked from, which imports torch
while the agent does. torch's parser decides; what is guessed wrongly here costs time and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Glance", "glance"]

_FLAGS = {
    "--standalone",
    "-m",
    "--module",
    "--no-python",
    "--run-path",
    "--virtual-local-rank",
}
"""Options of torchrun without a value (torch/distributed/run.py, 2.13); every other has one."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What the command line seems to ask for."""

    warm: bool
    """Workers are to start warm, and may."""
    preload: tuple[str, ...]
    run_id: str | None
    run_dir: str | None


def glance(arguments: Sequence[str], environ: Mapping[str, str]) -> Glance:
    """Look at the options before the script."""
    given: dict[str, str] = {}
    rest = iter(arguments)
    script = False
    for word in rest:
        if not word.startswith("-") or word == "-":
            script = True
            break
        option, sign, value = word.partition("=")
        if option.startswith("--"):
            option = "--" + option[2:].replace("_", "-")
        if option in ("-h", "--help"):
            break
        # A short option may have its value attached: -r3.
        if not sign and option not in _FLAGS and (option.startswith("--") or len(option) == 2):
            value = next(rest, "")
        given[option] = value
    start = given.get("--start", environ.get("PET_START", "warm"))
    preload = given.get("--preload", environ.get("PET_PRELOAD", ""))
    foreign = "--no-python" in given or environ.get("PET_NO_PYTHON", "0") != "0"
    other_python = environ.get("PYTHON_EXEC", sys.executable) != sys.executable
    return Glance(
        warm=script and start == "warm" and not foreign and not other_python,
        preload=tuple(name for name in preload.split(",") if name),
        run_id=given.get("--run-id") or given.get("--rdzv-id") or environ.get("PET_RDZV_ID") or None,
        run_dir=given.get("--run-dir") or environ.get("PET_RUN_DIR") or None,
    )
