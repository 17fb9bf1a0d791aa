"""What every verb of the command line has."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

from slurm_elastic.errors import SlurmElasticError, UsageError, did_you_mean

__all__ = ["Parser", "Verb", "reported"]


def reported(run: Callable[[], int]) -> int:
    """The exit code of a verb; an error of ours is printed as one line."""
    try:
        return run()
    except SlurmElasticError as error:
        print(f"slurm-elastic: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return int(error.exit_code)


class Parser(argparse.ArgumentParser):
    """A parser that leaves a wrong command line to the one place where errors are printed, as a single line.

    An option that there is not is what that line is about, whatever else argparse misses because of it.
    """

    _words: Sequence[str] = ()

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse what follows the verb.

        Raises:
            UsageError: it is wrong.
        """
        self._words = words
        for action in self._actions:
            if action.nargs == argparse.REMAINDER:
                # Before Python 3.13 something has to follow.
                action.required = False
        return super().parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        see = f"see {self.prog} --help"
        option = self._strange_option()
        if option is None:
            raise UsageError(f"{message}; {see}")
        # A long one is never meant for one of a single letter.
        known = [each for each in self._option_string_actions if each.startswith("--") is option.startswith("--")]
        raise UsageError(f"no option {option}; {did_you_mean(option, known, otherwise=see)}")

    def _strange_option(self) -> str | None:
        """The first option that there is not; what follows a script is the script's."""
        known = self._option_string_actions
        with_script = any(action.nargs == argparse.REMAINDER and not action.option_strings for action in self._actions)
        words = iter(self._words)
        for word in words:
            if word == "--" or (with_script and not word.startswith("-")):
                return None
            if not word.startswith("-") or word == "-":
                continue
            given, sign, _ = word.partition("=")
            # A short option may have its value attached, a long one may be cut short.
            option = given if given.startswith("--") else word[:2]
            near = [name for name in known if name.startswith(option)]
            if not near:
                return given
            takes_next = known.get(option, known[near[0]]).nargs is None and not sign and len(word) == len(option)
            if takes_next:
                next(words, None)
        return None


class Verb(ABC):
    """One verb. Its module imports nothing slow, so that ``--help`` is quick; torch is imported by `run`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``slurm-elastic --help``."""

    @abstractmethod
    def run(self, arguments: Sequence[str]) -> int:
        """Do it.

        Args:
            arguments: what follows the verb.

        Returns:
            The exit code.

        Raises:
            SlurmElasticError: printed as one line, with its exit code.
        """

    def execute(self, arguments: Sequence[str]) -> None:  # noqa: B027
        """Become another program that does it, where there is one; called only in a process that does nothing else."""

    def parser(self, *, examples: str = "") -> Parser:
        """Return an empty parser for the arguments of this verb."""
        return Parser(
            prog=f"slurm-elastic {self.name}",
            description=f"{self.summary[0].upper()}{self.summary[1:]}.",
            epilog=examples and f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
