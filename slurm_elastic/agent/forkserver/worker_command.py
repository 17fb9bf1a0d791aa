"""The command of the workers of a node, found without importing torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

        If the result is wrong, workers start cold, since their command differs, and a log line says so.

        Args:
            arguments: torchrun's flags, then the script and its arguments. A flag that torchrun lacks is assumed to
                have a value.
            environment: Where torchrun's parser finds PET_* defaults for its switches.

        Returns:
            None if no Python script is run (--no-python) or named; FUNCTION with --run-path.
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


_PACKAGE_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # noqa: PTH100, PTH118, PTH120

FUNCTION = Program(
    sys.executable,
    (
        "-u",
        "-c",
        f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
        "from slurm_elastic.agent.forkserver.torch_context import main; main()",
    ),
)
"""The program of workers whose entry point is a function; each gets its call through a memory file."""


_BOOT = os.path.join(os.path.dirname(__file__), "_boot")  # noqa: PTH118, PTH120  pathlib takes long to import


def boot_environment(environment: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment to execute the Python with. The settings come first, which `set_title` relies on."""
    python_path = environment.get("PYTHONPATH")
    return {
        "SLURM_ELASTIC_WARM": json.dumps(settings),
        **environment,
        "PYTHONPATH": os.pathsep.join([_BOOT, python_path] if python_path else [_BOOT]),
    }
