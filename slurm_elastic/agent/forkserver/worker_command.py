"""The command of the workers of a node, found without importing torch, and the processes that are executed with it.

Two imports of torch side by side compete for CPU cores and memory bandwidth, and workers wait for both. So the process
that Slurm has started first executes the command of a worker, stops in the middle of Python's start as a fork server
does (see `_boot`), imports torch, and forks the fork server (`_shared_import`). Only then does it import the agent's
modules and become the agent, with the process id, environment and signals that Slurm has given it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from slurm_elastic.agent.forkserver.linux import memory_file
from slurm_elastic.agent.option_table import scan


class Program(NamedTuple):
    """The Python command that all workers of a node have in common.

    torchrun starts `<interpreter> -u [-m] <target> <arguments>` (torch/distributed/run.py, config_from_args, 2.13).
    """

    interpreter: str
    """Path of the Python interpreter."""
    options: tuple[str, ...]
    """The words between the interpreter and the script's own arguments: ("-u", "train.py"), ("-u", "-m", "train")."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments; those of a worker may differ."""

    @classmethod
    def script(cls, target: str, arguments: Sequence[str] = (), *, module: bool = False) -> Program:
        """Return the command of a script or, with `module`, of `python -m`, with torchrun's choice of interpreter."""
        options = ("-u", "-m", target) if module else ("-u", target)
        return cls(os.environ.get("PYTHON_EXEC", sys.executable), options, tuple(arguments))

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Program | None:
        """Return what torchrun's parser would run for these arguments, found without importing torch.

        If the result is wrong, workers start cold, since their command differs, and a log line says so. The environment
        has PET_* defaults for switches; a flag that torchrun lacks is assumed to have a value. None if no Python script
        is run (--no-python) or named; FUNCTION with --run-path.
        """
        options = scan(arguments, environment)
        if options.script is None or options.has("no_python"):
            return None
        if options.has("run_path"):
            return FUNCTION
        return cls.script(options.script, options.arguments, module=options.has("module"))

    def command(self) -> list[str]:
        """Return the whole command."""
        return [self.interpreter, *self.options, *self.arguments]

    def arguments_of(self, command: Sequence[str]) -> tuple[str, ...] | None:
        """Return the script's own arguments in a command that runs this program; None if it runs another."""
        start = 1 + len(self.options)
        return tuple(command[start:]) if tuple(command[:start]) == (self.interpreter, *self.options) else None


def worker_environment(environment: Mapping[str, str], local_world_size: int | None) -> dict[str, str]:
    """Return the workers' environment, as far as libraries read it at import.

    torchrun sets OMP_NUM_THREADS to 1 if a node has several workers and it is not set (torch/distributed/run.py,
    config_from_args, 2.13), and OpenMP reads it at import.
    """
    environ = dict(environment)
    if local_world_size is not None and local_world_size > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    return environ


PACKAGE_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # noqa: PTH100, PTH118, PTH120

FUNCTION = Program(
    sys.executable,
    (
        "-u",
        "-c",
        f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); "
        "from slurm_elastic.agent.forkserver.worker_processes import main; main()",
    ),
)
"""The program of workers whose entry point is a function; each gets its call through a memory file."""


_BOOT = os.path.join(os.path.dirname(__file__), "_boot")  # noqa: PTH118, PTH120  pathlib takes long to import


def boot_environment(
    program: Program,
    environment: Mapping[str, str],
    preload: Sequence[str],
    mask: Collection[int],
    *,
    warm: bool,
    imports: str | None,
    **more: Any,
) -> dict[str, str]:
    """Return the environment to execute the Python with; the settings come first, which `set_title` relies on.

    They are the workers' environment, as far as known now, the modules to import besides torch, the signals that are
    blocked in workers, whether workers are forked, the directory of the lists of learned imports, and more.
    """
    python_path = environment.get("PYTHONPATH")
    settings = {
        "pythonpath": python_path,
        "warm": warm,
        "preload": list(preload),
        "imports": imports,
        "options": program.options,
        "signal_mask": sorted(map(int, mask)),
        **more,
    }
    return {
        "SLURM_ELASTIC_WARM": json.dumps(settings),
        **environment,
        "PYTHONPATH": os.pathsep.join([_BOOT, python_path] if python_path else [_BOOT]),
    }


def obstacle_to_sharing(program: Program) -> str | None:
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
) -> NoReturn:
    """Execute the process that imports torch in place of this one.

    Args:
        program: The program of the workers, for which `obstacle_to_sharing` has returned None.
        imports: The directory of the lists of learned imports; None to learn none.
        agent_main: ``module:function`` that becomes the agent and returns its exit code. It is called with `arguments`,
            the ForkServer (None if the agent has to start one), the signal mask of this process, and the reason why
            there is no ForkServer, as from `obstacle_to_sharing`. Environment, sys.argv and sys.path are those of this
            call.
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
    }
    descriptor = memory_file(json.dumps(state).encode())
    os.set_inheritable(descriptor, True)
    boot = boot_environment(
        program,
        environment,
        preload,
        mask,
        warm=True,
        imports=imports,
        joint=descriptor,
        inherited=_inheritable_descriptors(),
    )
    os.execve(program.interpreter, program.command(), boot)


def _inheritable_descriptors() -> list[int]:
    """Return the descriptors beyond the standard streams that an executed process keeps."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The directory itself is closed by now.
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                descriptors.append(int(name))
    return descriptors
