"""``slurm-elastic COMMAND ...``: finds the command, runs it, prints errors."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser, add_print_completion, with_one_line_errors
from slurm_elastic.descriptors import open_standard_streams
from slurm_elastic.errors import ExitCode, UsageError, did_you_mean

_COMMANDS = (
    *("agent", "checkpoints", "coordinator", "doctor", "drain", "example", "grow", "job-end", "list", "logs"),
    *("rehearse", "report", "requeue", "resize", "shrink", "status", "submit", "template", "top"),
)
_MODULES = {"example": "template", "grow": "resize", "list": "status", "requeue": "drain", "shrink": "resize"}
"""The modules whose name is not that of the command. Only the module of the command that runs is imported: until the
agent records signals, a signal from Slurm ends the process."""

_OLDER_NAMES = {"store": "coordinator", "verdict": "job-end"}
"""Names that copied batch scripts use; they stay for good."""

_EXAMPLES = """\
examples:
  slurm-elastic example digits > digits.py               a training script to begin with
  slurm-elastic template allocation > elastic.sbatch     write a batch script to adapt to your site, once
  sbatch --nodes=2-8 --gpus-per-node=4 elastic.sbatch train.py --lr 1e-3
  slurm-elastic agent train.py --lr 1e-3                 train on one node, with or without Slurm

'slurm-elastic COMMAND --help' describes a command. Older names stay valid: store for coordinator, verdict for job-end.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name, or that of this process, and return its exit code."""
    open_standard_streams()
    return with_one_line_errors(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        # A batch script with an empty variable in the place of the command fails, as before.
        _parser().print_help(sys.stderr)
        return ExitCode.USAGE
    if words[0] in (*_COMMANDS, *_OLDER_NAMES):
        # Making a parser takes milliseconds for which an agent's workers would wait.
        name, arguments = words[0], words[1:]
    else:
        options = _parser().parse_args(words)
        name, arguments = options.command, options.arguments
    try:
        os.getcwd()  # noqa: PTH109  pathlib takes long to import
    except OSError as error:
        raise UsageError(f"the current directory cannot be used ({error.strerror}); change to another one") from None
    command = _command(name)
    # Scripts, paths and errors have characters that not every locale has. Workers of an agent find stdout as Python
    # opens it.
    out = sys.stdout
    if name != "agent" and isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or out.encoding != "utf-8"):
        out.reconfigure(errors="backslashreplace")
    if argv is None:
        command.execute(arguments)
    return command.run(arguments)


class _MainParser(Parser):
    def format_help(self) -> str:
        """Add the summaries of all commands, which imports their modules."""
        lines = "\n".join(f"  {command.name:<12}{command.summary}" for command in commands())
        self.description = f"PyTorch training on Slurm that grows, shrinks and restarts.\n\ncommands:\n{lines}"
        return super().format_help()


def _parser() -> Parser:
    from slurm_elastic._version import __version__

    parser = _MainParser(
        prog="slurm-elastic",
        usage="slurm-elastic [--version] [--help] COMMAND ...",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slurm-elastic {__version__}")
    add_print_completion(parser)
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def commands() -> list[Command]:
    """Return all commands; imports their modules."""
    return [_command(name) for name in _COMMANDS]


def _command(name: str) -> Command:
    name = _OLDER_NAMES.get(name, name)
    if name not in _COMMANDS:
        fix = did_you_mean(name, (*_COMMANDS, *_OLDER_NAMES), otherwise=f"the commands are {', '.join(_COMMANDS)}")
        raise UsageError(f"no command {name!r}; {fix}")
    module = importlib.import_module(f"slurm_elastic.cli.commands.{_MODULES.get(name, name).replace('-', '_')}")
    command: type[Command] = getattr(module, name.title().replace("-", ""))
    return command()
