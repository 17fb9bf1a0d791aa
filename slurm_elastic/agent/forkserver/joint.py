"""One import of torch for the agent and its fork server, before either of them is there.

Side by side, two imports of torch take each other's processor cores and memory bandwidth, and workers wait for both.
So the process that is to become the agent first executes the command of a worker, is stopped as a fork server is (see
`_boot`), imports torch, and forks the fork server. Only then does it import what an agent needs and become the agent:
the process that Slurm started, with its process id, its environment and its signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from slurm_elastic.agent.forkserver._bootstrap_env import boot_environment
from slurm_elastic.agent.forkserver._memfd import memory_file
from slurm_elastic.agent.forkserver.worker_command import FUNCTION, Program

__all__ = ["execute_jointly", "obstacle"]


def obstacle(program: Program) -> str | None:
    """Return why the agent and the fork server cannot have one import of torch; None if they can.

    The worker's interpreter has to be this one, started with no flag that the other would lack. Empty for another
    interpreter: the start of the workers tells of it.
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
    workers: int,
    imports: str | None,
    go_on: str,
    arguments: Sequence[str],
    signals: Sequence[signal.Signals],
) -> None:
    """Become the process that imports torch; returns only if that cannot be executed.

    Args:
        program: what the workers will run; see `can_be_joint`.
        preload: modules that the fork server imports besides.
        environment: what the workers' environment will be, as far as known now.
        workers: how many are forked before the agent asks for them; it may come to ask for more or fewer.
        imports: the directory of the lists of learned imports; None if none are learned.
        go_on: ``module:function`` that is called in the agent, with `arguments`, its ForkServer, or None if it has to
            start one itself, the signals that were blocked, and why it has to start one, as from `obstacle`. It returns
            the exit code. The environment, sys.argv and sys.path are those of now.
        arguments: of the agent.
        signals: blocked from now on; `go_on` unblocks them, once it has handlers for them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    state = {
        "go_on": go_on,
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
        "workers": workers,
        "imports": imports,
        "options": program.options,
        "signal_mask": sorted(int(number) for number in mask),
        "joint": descriptor,
        "inherited": _inheritable_files(),
    }
    try:
        os.execve(program.interpreter, program.command(), boot_environment(environment, settings))
    except OSError:
        os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _inheritable_files() -> list[int]:
    """Besides the standard streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The directory itself is closed by now.
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def _task_name() -> str:
    with open("/proc/self/comm") as file:  # noqa: PTH123  pathlib takes long to import
        return file.read().strip()
