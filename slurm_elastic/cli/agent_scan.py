"""A quick look at the agent's command line, without torch's parser, whose import takes a second or more.

For what has to be known before that: how to start the process that starts workers, which imports torch while the agent
does. torch's parser decides; what is guessed wrongly here costs time and nothing else.

All workers wait for what happens before torch is imported, so what is needed there makes no dataclasses: these import
`inspect`, which takes as long as everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Glance", "glance"]

_FLAGS = {
    "--standalone",
    "-m",
    "--module",
    "--no-python",
    "--run-path",
    "--virtual-local-rank",
    "--no-watchdog",
    "--no-health",
}
"""Options without a value, torchrun's (torch/distributed/run.py, 2.13) and ours; every other has one."""


class Glance(NamedTuple):
    """What the command line seems to say; None where it says nothing."""

    script: str | None = None
    """The script, module or program."""
    start: str | None = None
    preload: tuple[str, ...] = ()
    nproc_per_node: str | None = None
    run_id: str | None = None
    run_dir: str | None = None
    max_requeues: str | None = None
    grace: str | None = None
    warning: str | None = None


def glance(arguments: Sequence[str], environ: Mapping[str, str]) -> Glance:
    """Look at the options before the script, and at PET_* for those that are not there."""
    given: dict[str, str] = {}
    rest = iter(arguments)
    script = None
    for word in rest:
        if not word.startswith("-"):
            script = word
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

    def said(option: str, variable: str) -> str | None:
        return given.get(option) or environ.get(variable) or None

    return Glance(
        script=script,
        start=said("--start", "PET_START"),
        preload=tuple(name for name in (said("--preload", "PET_PRELOAD") or "").split(",") if name),
        nproc_per_node=said("--nproc-per-node", "PET_NPROC_PER_NODE"),
        run_id=given.get("--run-id") or said("--rdzv-id", "PET_RDZV_ID"),
        run_dir=said("--run-dir", "PET_RUN_DIR"),
        max_requeues=said("--max-requeues", "PET_MAX_REQUEUES"),
        grace=said("--grace", "PET_GRACE"),
        warning=said("--warning", "PET_WARNING"),
    )
