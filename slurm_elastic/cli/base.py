"""What every verb of the command line has."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

from slurm_elastic.errors import SlurmElasticError, UsageError

__all__ = ["Parser", "Verb", "reported"]


def reported(run: Callable[[], int]) -> int:
    """The exit code of a verb; an error of ours is printed as one line."""
    try:
        return run()
    except SlurmElasticError as error:
        print(f"slurm-elastic: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return int(error.exit_code)


class Parser(argparse.ArgumentParser):
    """A parser that leaves a wrong command line to the one place where errors are printed, as a single line."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


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
