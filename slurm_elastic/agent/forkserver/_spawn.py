"""Executes a fork server on its own, where it is not forked from the process that becomes the agent (see `joint`)."""

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


def spawn(
    program: Program, environment: Mapping[str, str], preload: Sequence[str], *, warm: bool, imports: str | None
) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start a fork server; return the agent's end of the channel to it, and the process.

    Args:
        program: The program of the workers, whose command the fork server is executed with.
        environment: The workers' environment, as far as known.
        preload: Modules to import besides torch.
        warm: True to import torch and fork workers; False to execute each worker.
        imports: The directory of the lists of learned imports; None to learn none.
    """
    near_end, far_end = Channel.pair()
    # Slurm signals every process of a step. The fork server blocks all signals, since its end would end the workers,
    # which may still be saving; its workers get the mask that is in force here.
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
        # An agent that starts a second fork server has raised its own limit on open files in the meantime.
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, given_limit())
    return near_end, process
