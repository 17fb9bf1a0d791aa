"""Starting a fork server on its own, where it is not forked from what becomes the agent (see `joint`)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence

from slurm_elastic.agent.forkserver._bootstrap_env import boot_environment
from slurm_elastic.agent.forkserver._channel import Channel
from slurm_elastic.agent.forkserver.worker_command import Program
from slurm_elastic.descriptors import given_limit

__all__ = ["spawn"]


def spawn(
    program: Program, environment: Mapping[str, str], preload: Sequence[str], *, warm: bool, imports: str | None
) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start it; returns this end of the line to it, and the process.

    Args:
        program: whose command it is executed with.
        environment: what its workers' will be, as far as known.
        preload: modules to import besides torch.
        warm: whether it imports anything; otherwise it starts workers cold.
        imports: the directory of the lists of learned imports; None if none are learned.
    """
    near_end, far_end = Channel.pair()
    # Slurm signals every process of a step. This one must live as long as a worker wants to, so that it never takes a
    # signal; its workers get the mask that is in force here.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    settings = {
        "agent": os.getpid(),
        "channel": far_end.fileno(),
        "pythonpath": environment.get("PYTHONPATH"),
        "warm": warm,
        "preload": preload,
        "imports": imports,
        "options": program.options,
        "signal_mask": sorted(int(number) for number in mask),
    }
    try:
        process = subprocess.Popen(
            program.command(),
            env=boot_environment(environment, settings),
            pass_fds=[far_end.fileno()],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        far_end.close()
    with contextlib.suppress(ProcessLookupError):
        # One that replaces another is started by an agent that has raised its own.
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, given_limit())
    return near_end, process
