"""The command that every worker of a node runs, known before torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurm_elastic.agent.option_table import scan

__all__ = ["FUNCTION", "Program", "worker_environment"]


class Program(NamedTuple):
    """The Python command of a worker, without what differs from rank to rank.

    torchrun starts `<interpreter> -u [-m] <target> <arguments>` (torch/distributed/run.py, config_from_args, 2.13).
    """

    interpreter: str
    """Path of the Python interpreter."""
    options: tuple[str, ...]
    """What stands between the interpreter and the script's own arguments: ("-u", "train.py"), ("-u", "-m", "train")."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments; a worker may be given others."""

    @classmethod
    def script(cls, target: str, arguments: Sequence[str] = (), *, module: bool = False) -> Program:
        """A script or, with `module`, what `python -m` runs; by the interpreter that torchrun would take."""
        options = ("-u", "-m", target) if module else ("-u", target)
        return cls(os.environ.get("PYTHON_EXEC", sys.executable), options, tuple(arguments))

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Program | None:
        """Return what torchrun's parser would run for these arguments, found without importing torch.

        A wrong guess costs speed, never truth: workers whose command differs start cold and say so.

        Args:
            arguments: torchrun's flags, then the script and its arguments. A flag that torchrun lacks is taken to have
                a value.
            environment: Where torchrun's parser finds PET_* defaults for its switches.

        Returns:
            None when no Python script is run (--no-python), or none was named. With --run-path: FUNCTION.
        """
        found = scan(arguments, environment)
        if found.script is None or found.has("no_python"):
            return None
        if found.has("run_path"):
            return FUNCTION
        return cls.script(found.script, found.arguments, module=found.has("module"))

    def command(self) -> list[str]:
        """The command line."""
        return [self.interpreter, *self.options, *self.arguments]

    def arguments_of(self, command: Sequence[str]) -> tuple[str, ...] | None:
        """The script's own arguments in a command that runs this same program; None if it runs another."""
        start = 1 + len(self.options)
        return tuple(command[start:]) if tuple(command[:start]) == (self.interpreter, *self.options) else None


def worker_environment(environment: Mapping[str, str], local_world_size: int | None) -> dict[str, str]:
    """Return the environment that workers will have, as far as libraries read it at import.

    torchrun sets OMP_NUM_THREADS to 1 where there are several workers on a node and it is not set
    (torch/distributed/run.py, config_from_args, 2.13), and OpenMP reads that at import.
    """
    known = dict(environment)
    if local_world_size is not None and local_world_size > 1:
        known.setdefault("OMP_NUM_THREADS", "1")
    return known


_PACKAGE_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # noqa: PTH100, PTH118, PTH120

FUNCTION = Program(
    sys.executable,
    (
        "-u",
        "-c",
        f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
        "from slurm_elastic.agent.forkserver._function_call import main; main()",
    ),
)
"""The program of workers whose entry point is a function; the call itself reaches them later."""
