"""The base class of all commands of ``slurm-elastic``, their parser, ``--print-completion``, and errors in one line."""

from __future__ import annotations

import argparse
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

from slurm_elastic.errors import SlurmElasticError, UsageError, did_you_mean


def with_one_line_errors(run: Callable[[], int]) -> int:
    """Run a command; print an error of this project as one line on stderr and return its exit code."""
    try:
        return run()
    except SlurmElasticError as error:
        print(f"slurm-elastic: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return int(error.exit_code)


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a wrong command line.

    If the command line has an unknown option, the error names that option, whatever else argparse misses because of it.
    """

    _words: Sequence[str] = ()

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse the arguments of the command."""
        self._words = words
        rest = next((action for action in self._actions if action.nargs == argparse.REMAINDER), None)
        if rest is None:
            return super().parse_args(words)
        # Before Python 3.13 argparse requires at least one argument here.
        rest.required = False
        # argparse looks for options, and for beginnings of them, among the script's own words, too.
        end = self._read()[1]
        parsed = super().parse_args(words[:end])
        if words[end:]:
            setattr(parsed, rest.dest, list(words[end:]))
        return parsed

    def parse_with_sbatch(self, words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str | None]]:
        """Parse the arguments of a command, and return the options of sbatch among them by their long names."""
        from slurm_elastic.submission.submit_options import read_command_line

        options, switches = self.long_options()
        own: list[str] = []
        sbatch: dict[str, str | None] = {}
        while words:
            line = read_command_line(words, options, switches)
            own += [f"--{name}" if value is None else f"--{name}={value}" for name, value in line.own.items()]
            own += line.agent if line.script is None else [*line.agent, line.script]
            sbatch |= line.sbatch
            words = line.arguments
        return self.parse_args(own), sbatch

    def long_options(self) -> tuple[set[str], set[str]]:
        """Return the long options, with dashes inside, and those of them that take no value."""
        actions = {
            name.replace("_", "-"): action
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and name != "--help"
        }
        return set(actions), {name for name, action in actions.items() if action.nargs == 0}

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        see = f"see {self.prog} --help"
        option = self._read()[0]
        if option is None:
            raise UsageError(f"{message}; {see}")
        # Suggest a long option for a long one, and a single letter for a single letter.
        names = [name for name in self._option_string_actions if name.startswith("--") is option.startswith("--")]
        raise UsageError(f"no option {option}; {did_you_mean(option, names, otherwise=see)}")

    def _read(self) -> tuple[str | None, int]:
        """Return the first unknown option, and the number of words before those that belong to a script."""
        actions = self._option_string_actions
        # The script is the last of the words that stand before its arguments.
        before = [action.nargs for action in self._actions if not action.option_strings]
        left = before.index(argparse.REMAINDER) if argparse.REMAINDER in before else -1
        words = iter(enumerate(self._words, 1))
        for end, word in words:
            if word == "--":
                return None, end + max(left, 0)
            if not word.startswith("-") or word == "-":
                left -= 1
                if left == 0:
                    return None, end
                continue
            word_name, sign, _ = word.partition("=")
            # A short option may have its value attached, a long option may be abbreviated.
            option = word_name if word_name.startswith("--") else word[:2]
            near = [name for name in actions if name.startswith(option)]
            if not near:
                return word_name, len(self._words)
            takes = actions.get(option, actions[near[0]]).nargs
            if takes == argparse.REMAINDER:
                return None, end
            if takes is None and not sign and len(word) == len(option):
                next(words, None)
        return None, len(self._words)


class Command(ABC):
    """One command of ``slurm-elastic``.

    Its module imports nothing slow, so that ``--help`` is quick; `run` imports torch where the command needs it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """The line of the command in ``slurm-elastic --help``."""

    examples: ClassVar[str] = ""
    """Lines for the end of the help text."""

    @abstractmethod
    def run(self, arguments: Sequence[str]) -> int:
        """Run the command, and return its exit code; the caller prints a SlurmElasticError as one line."""

    def execute(self, arguments: Sequence[str]) -> None:  # noqa: B027
        """Replace this process by another program that runs the command, if there is one; otherwise return.

        The caller calls this only in a process that does nothing else.
        """

    def add_options(self, parser: Parser) -> None:  # noqa: B027
        """Add the arguments of the command."""

    def parser(self) -> Parser:
        """Return the parser of this command; a shell completes the options that it has."""
        parser = Parser(
            prog=f"slurm-elastic {self.name}",
            description=f"{self.summary[0].upper()}{self.summary[1:]}.",
            epilog=self.examples and f"examples:\n{self.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        add_print_completion(parser)
        return parser

    def completion_parser(self) -> Parser:
        """Return the parser whose options and values a shell completes, where it knows more than that of `parser`."""
        return self.parser()


def with_sbatch_options(parser: Parser) -> Parser:
    """Return a parser with the options of sbatch that it lacks, for a shell that completes them."""
    from slurm_elastic.submission.submit_options import SBATCH_OPTIONS

    for name in SBATCH_OPTIONS:
        if f"--{name}" not in parser._option_string_actions:
            parser.add_argument(f"--{name}", help="option of sbatch")
    return parser


def add_print_completion(parser: argparse._ActionsContainer) -> None:
    """Add the option to a parser, or to a group of its options."""
    text = "print a script that completes slurm-elastic in a shell, and exit; needs shtab"
    names = ("--print-completion", "--print_completion")
    parser.add_argument(*names, action=_PrintCompletion, choices=("bash", "zsh", "tcsh"), help=text)


class _PrintCompletion(argparse.Action):
    """Prints what a shell completes after ``slurm-elastic``; torch's own would print that of torchrun (torch 2.14)."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
        print(_script(str(shell)))
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
            is_script = not action.option_strings and action.dest.endswith(("script", "script_args", "arguments"))
            if action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.metavar in ("FILE", "PATH") or is_script:
                # Any argument that a shell does not know may be a file as well.
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        _spell_with_dashes(parser)
        parsers.add_parser(command.name, help=command.summary, parents=[parser], add_help=False)
    return str(shtab.complete(whole, shell=shell))


def _spell_with_dashes(parser: argparse.ArgumentParser) -> None:
    """Forget the spellings with underscores: a shell would offer every option twice."""
    for action in parser._actions:
        action.option_strings = [name for name in action.option_strings if "_" not in name]
