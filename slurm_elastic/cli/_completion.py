"""``--print-completion``: a script by which a shell completes ``slurm-elastic``, its commands and their options."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from slurm_elastic.errors import UsageError

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("FILE", "PATH")
"""Names of values that are files, in help texts; every argument that a shell does not know may be one as well."""


def add_print_completion(parser: argparse._ActionsContainer) -> None:
    """Add the option to a parser, or to a group of its options."""
    parser.add_argument(
        "--print-completion",
        "--print_completion",
        action=_PrintCompletion,
        choices=_SHELLS,
        help="print a script that completes slurm-elastic in a shell, and exit; needs shtab",
    )


class _PrintCompletion(argparse.Action):
    """Prints what a shell completes after ``slurm-elastic``; torch's own would print that of torchrun (torch 2.14)."""

    def __call__(self, parser: argparse.ArgumentParser, *_arguments: object) -> None:
        print(_script(str(_arguments[1])))
        parser.exit()


def _script(shell: str) -> str:
    try:
        shtab = importlib.import_module("shtab")
    except ModuleNotFoundError:
        raise UsageError("--print-completion needs the package shtab; pip install shtab") from None
    # The commands import this module.
    from slurm_elastic.cli.main import commands

    whole = argparse.ArgumentParser(prog="slurm-elastic")
    whole.add_argument("--version", action="version", version="", help="print the version")
    add_print_completion(whole)
    _spell_with_dashes(whole)
    parsers = whole.add_subparsers()
    for command in commands():
        parser = command.completion_parser()
        for action in parser._actions:
            kind = _kind_of_path(action)
            if kind is not None:
                action.complete = getattr(shtab, kind)  # type: ignore[attr-defined]
        _spell_with_dashes(parser)
        parsers.add_parser(command.name, help=command.summary, parents=[parser], add_help=False)
    script = shtab.complete(whole, shell=shell)
    assert isinstance(script, str)
    return script


def _spell_with_dashes(parser: argparse.ArgumentParser) -> None:
    """Forget the spellings with underscores: a shell would offer every option twice."""
    for action in parser._actions:
        action.option_strings = [name for name in action.option_strings if "_" not in name]


def _kind_of_path(action: argparse.Action) -> str | None:
    """Return the name in shtab for what the shell completes the value with; None if it is no path."""
    metavar: Any = action.metavar
    if metavar == "DIR":
        return "DIRECTORY"
    is_script = not action.option_strings and action.dest.endswith(("script", "script_args", "arguments"))
    return "FILE" if metavar in _FILES or action.type is Path or is_script else None
