"""Imports torch once for the agent and its fork server, in the process that becomes the agent.

Two imports of torch side by side compete for CPU cores and memory bandwidth, and workers wait for both.
So the process that Slurm has started first executes the command of a worker, stops in the middle of Python's start as a
fork server does (see `_boot`), imports torch, and forks the fork server. Only then does it import the agent's modules
and become the agent, with the process id, environment and signals that Slurm has given it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from slurm_elastic.agent.forkserver._linux import memory_file
from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program, boot_environment


def obstacle(program: Program) -> str | None:
    """Return why the agent and the fork server cannot share one import of torch, for people; None if they can.

    The worker's interpreter has to be that of the agent, and the agent's was started without flags, which the worker's
    would lack. The reason is empty for another interpreter: the start of the workers logs that.
    """
    if program is FUNCTION:
        return "--run-path"
    if program.interpreter != sys.executable:
        return ""
    flag = next(iter(sys.orig_argv[1:2]), "")
    if not flag or (flag.startswith("-") and flag != "-m"):
        return f"the agent's Python was started with {flag or 'no script'}"
    return None


def execute_jointly(
    program: Program,
    preload: Sequence[str],
    environment: Mapping[str, str],
    *,
    imports: str | None,
    agent_main: str,
    arguments: Sequence[str],
    signals: Sequence[signal.Signals],
) -> None:
    """Execute the process that imports torch in place of this one; return only if that fails.

    Args:
        program: The program of the workers, for which `obstacle` has returned None.
        preload: Modules that the fork server imports besides torch.
        environment: The workers' environment, as far as known now.
        imports: The directory of the lists of learned imports; None to learn none.
        agent_main: ``module:function`` that becomes the agent and returns its exit code. It is called with `arguments`,
            the ForkServer (None if the agent has to start one), the signal mask of this process, and the reason why
            there is no ForkServer, as from `obstacle`. Environment, sys.argv and sys.path are those of this call.
        arguments: The command line of the agent.
        signals: The signals to block from now on; `agent_main` unblocks them when it has handlers for them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    state = {
        "agent_main": agent_main,
        "arguments": list(arguments),
        "environment": dict(os.environ),
        "path": sys.path,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "name": _task_name(),
        "program": [program.interpreter, program.options, program.arguments],
        "known": dict(environment),
    }
    descriptor = memory_file(json.dumps(state).encode())
    os.set_inheritable(descriptor, True)
    settings = {
        "pythonpath": environment.get("PYTHONPATH"),
        "warm": True,
        "preload": list(preload),
        "imports": imports,
        "options": program.options,
        "signal_mask": sorted(int(number) for number in mask),
        "joint": descriptor,
        "inherited": _inheritable_descriptors(),
    }
    try:
        os.execve(program.interpreter, program.command(), boot_environment(environment, settings))
    except OSError:
        os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _inheritable_descriptors() -> list[int]:
    """Return the descriptors beyond the standard streams that an executed process keeps."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The directory itself is closed by now.
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                descriptors.append(int(name))
    return descriptors


def _task_name() -> str:
    with open("/proc/self/comm") as file:  # noqa: PTH123  pathlib takes long to import
        return file.read().strip()
