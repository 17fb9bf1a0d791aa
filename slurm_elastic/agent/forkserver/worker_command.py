"""What every worker of a node runs, known before torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
        """What torchrun's parser would run for these arguments, found without importing torch.

        A wrong guess costs speed, never truth: workers whose command differs start cold and say so.

        Args:
            arguments: torchrun's flags, then the script and its arguments. A flag that torchrun lacks is taken to have
                a value.
            environment: Where torchrun's parser finds PET_* defaults for its switches.

        Returns:
            None when no Python script is run (--no-python), or none was named. With --run-path: FUNCTION.
        """
        seen = {dest for dest in _ALL_SWITCHES.values() if environment.get(f"PET_{dest.upper()}", "0") not in ("0", "")}
        position = 0
        while position < len(arguments) and arguments[position].startswith("-"):
            flag, has_value, _value = arguments[position].partition("=")
            switch = _switch(flag)
            if flag == "--":
                position += 1
                break
            if switch is not None:
                seen.add(switch)
            elif not has_value and not _value_is_attached(flag):
                position += 1
            position += 1
        if "no_python" in seen or position >= len(arguments):
            return None
        if "run_path" in seen:
            return FUNCTION
        return cls.script(arguments[position], arguments[position + 1 :], module="module" in seen)

    def command(self) -> list[str]:
        """The command line."""
        return [self.interpreter, *self.options, *self.arguments]

    def arguments_of(self, command: Sequence[str]) -> tuple[str, ...] | None:
        """The script's own arguments in a command that runs this same program; None if it runs another."""
        start = 1 + len(self.options)
        return tuple(command[start:]) if tuple(command[:start]) == (self.interpreter, *self.options) else None


def worker_environment(environment: Mapping[str, str], local_world_size: int | None) -> dict[str, str]:
    """What the environment of workers will be, as far as libraries read it at import.

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

# Flags of torchrun's parser that take no value (torch/distributed/run.py, get_args_parser, 2.13), and where they land.
_SWITCHES = {
    "--standalone": "standalone",
    "-m": "module",
    "--module": "module",
    "--no-python": "no_python",
    "--no_python": "no_python",
    "--run-path": "run_path",
    "--run_path": "run_path",
    "--virtual-local-rank": "virtual_local_rank",
    "--virtual_local_rank": "virtual_local_rank",
    "-h": "help",
    "--help": "help",
}
_OWN_SWITCHES = {
    "--no-watchdog": "no_watchdog",
    "--no_watchdog": "no_watchdog",
    "--no-health": "no_health",
    "--no_health": "no_health",
}
_ALL_SWITCHES = {**_SWITCHES, **_OWN_SWITCHES}
# Long flags that take a value and are also written as a single letter: "-r3" carries its value.
_LETTERS_WITH_VALUE = ("-r", "-t")


def _switch(flag: str) -> str | None:
    if flag in _ALL_SWITCHES:
        return _ALL_SWITCHES[flag]
    # argparse accepts a long flag's beginning where only one flag starts so.
    meant = {
        dest
        for name, dest in _ALL_SWITCHES.items()
        if flag.startswith("--") and len(flag) > 2 and name.startswith(flag)
    }
    return meant.pop() if len(meant) == 1 else None


def _value_is_attached(flag: str) -> bool:
    return len(flag) > 2 and flag[:2] in _LETTERS_WITH_VALUE and not flag.startswith("--")
