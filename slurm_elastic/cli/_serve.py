"""What the verbs have in common that serve a run from a job of their own, until it is over or they are told to end."""

from __future__ import annotations

import argparse
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from slurm_elastic.cli._command import Parser, Verb
from slurm_elastic.errors import UsageError

if TYPE_CHECKING:
    from slurm_elastic.agent.signals import Notices

__all__ = ["ServingVerb"]

_SUBMIT = "--submit"


class ServingVerb(Verb):
    """A verb that serves from its start to a signal, and may submit the job that it serves."""

    examples: ClassVar[str]
    """For ``--help``."""
    submitting: ClassVar[str]
    """What ``--submit`` is for, for ``--help``."""
    submitted: ClassVar[str]
    """An example of what may follow it."""

    @abstractmethod
    def add_options(self, parser: Parser) -> None:
        """Add all options but ``--submit``."""

    def check(self, options: argparse.Namespace) -> None:
        """Raise UsageError for options that do not go together; ``options.submit`` are the arguments of sbatch."""

    @abstractmethod
    def serve(self, options: argparse.Namespace, notices: Notices, node: str) -> int:
        """Do it, and return the exit code.

        Args:
            options: of the command line.
            notices: the signals of this process.
            node: this one.

        Raises:
            SlurmElasticError: printed as one line, with its exit code.
        """

    def run(self, arguments: Sequence[str]) -> int:
        """Serve until a signal comes or there is nothing more to serve."""
        options = self._options(arguments)
        from slurm_elastic.agent.signals import record_signals

        notices = record_signals()
        from slurm_elastic.agent.console_log import tell
        from slurm_elastic.agent.nonblocking_output import make_output_nonblocking

        node = os.environ.get("SLURMD_NODENAME", "localhost")
        make_output_nonblocking()
        tell(node)
        return self.serve(options, notices, node)

    def _options(self, arguments: Sequence[str]) -> argparse.Namespace:
        parser = self.parser(examples=self.examples)
        self.add_options(parser)
        parser.add_argument(_SUBMIT, nargs=argparse.REMAINDER, metavar="...", help=f"last: {self.submitting}")
        # argparse would take options of sbatch for its own.
        own = list(arguments).index(_SUBMIT) if _SUBMIT in arguments else len(arguments)
        options = parser.parse_args(arguments[:own])
        options.submit = arguments[own + 1 :]
        if own < len(arguments) and not options.submit:
            raise UsageError(f"{_SUBMIT}: name a batch script, as in {_SUBMIT} {self.submitted}")
        self.check(options)
        return options
