"""``slurm-elastic agent``: one elastic agent on this node."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli.agent_scan import glance
from slurm_elastic.cli.base import Verb

if TYPE_CHECKING:
    from slurm_elastic.agent.warm import WarmProcess

__all__ = ["Agent"]


class Agent(Verb):
    """Runs the agent of this node until the run, or its part in it, is over."""

    name = "agent"
    summary = "train with one elastic agent on this node; every option of torchrun works"

    def run(self, arguments: Sequence[str]) -> int:
        """Resolve the command line and Slurm's environment, and launch."""
        from slurm_elastic.agent import notices

        # First of all: until then a signal from Slurm has its default action and simply ends the process.
        notices.record_signals()
        from slurm_elastic.agent.story import tell

        tell(os.environ.get("SLURMD_NODENAME", "localhost"))
        from slurm_elastic.rendezvous.private import take_private

        private = take_private(os.environ)
        warm = _start_warm(arguments)
        try:
            with _quick_imports():
                # Slow: this imports torch.
                from slurm_elastic.agent.claim import claim
                from slurm_elastic.agent.launch import launch
                from slurm_elastic.agent.settings import resolve
                from slurm_elastic.cli.agent_parser import agent_parser
            settings = resolve(agent_parser().parse_args(arguments), {**os.environ, **private})
            settings.run_dir.open()
            with claim(settings.run_dir.secret(), settings.node, settings.job):
                return int(launch(settings, warm))
        finally:
            warm.close()


def _start_warm(arguments: Sequence[str]) -> WarmProcess:
    """Start the process that starts workers, so that its imports run while the agent does its own."""
    from slurm_elastic.agent.warm import Program, WarmProcess

    seen = glance(arguments, os.environ)
    return WarmProcess.start(
        Program.from_command_line(arguments),
        # Without a script there is only a help text or an error to come.
        warm=seen.start in (None, "warm") and seen.script is not None,
        preload=seen.preload,
        local_world_size=_local_world_size(seen.nproc_per_node),
    )


def _local_world_size(text: str | None) -> int:
    if text is not None and text.isdecimal():
        return int(text)
    from slurm_elastic.slurm import SlurmJob

    job = SlurmJob.from_environment(os.environ)
    gpus = job.gpus_on_node if job else 0
    # What auto, cpu and gpu come to is known to torch; whether it is more than one is guessed well enough.
    return gpus or (1 if text is None else os.cpu_count() or 1)


_POOL = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Around imports that the workers wait for.

    Garbage is not collected: what imports make stays, and looking through it again and again takes a tenth of their
    time. numpy's OpenBLAS starts no pool of threads, which spin for a while at first, on the cores on which the warm
    process imports torch; an agent has nothing for them to do.
    """
    gc.disable()
    given = _POOL in os.environ
    os.environ.setdefault(_POOL, "1")
    try:
        yield
    finally:
        if not given:
            del os.environ[_POOL]
        gc.freeze()
        gc.enable()
