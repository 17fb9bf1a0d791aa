"""The base class of commands that serve a run from a job of their own, until the run is over or a signal comes."""

from __future__ import annotations

import argparse
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from slurm_elastic.cli._command import Command
from slurm_elastic.errors import UsageError

if TYPE_CHECKING:
    from slurm_elastic.agent.signals import Notices

__all__ = ["ServingCommand"]

_SUBMIT = "--submit"


class ServingCommand(Command):
    """A command that serves from its start until a signal comes, and may submit the job that it serves."""

    submit_help: ClassVar[str]
    """Help text of ``--submit``."""
    submit_example: ClassVar[str]
    """Example of the words that follow ``--submit``."""

    def check(self, options: argparse.Namespace) -> None:
        """Raise UsageError for options that contradict each other; ``options.submit`` has the arguments of sbatch."""

    @abstractmethod
    def serve(self, options: argparse.Namespace, notices: Notices, node: str) -> int:
        """Serve, and return the exit code.

        Args:
            options: The parsed command line.
            notices: The signals that this process has received.
            node: Slurm's name of this node; ``localhost`` outside Slurm.

        Raises:
            SlurmElasticError: The command failed. The caller prints the message as one line.
        """

    def run(self, arguments: Sequence[str]) -> int:
        """Serve until a signal comes or the run is over."""
        options = self._options(arguments)
        from slurm_elastic.agent.signals import record_signals

        notices = record_signals()
        from slurm_elastic.agent.console_log import configure_logging
        from slurm_elastic.agent.nonblocking_output import make_output_nonblocking
        from slurm_elastic.slurm import Reader, drop_foreign

        # Here, not in the submission: agents of the run that is submitted get more variables of ours.
        drop_foreign(os.environ, Reader.TASK)
        node = os.environ.get("SLURMD_NODENAME", "localhost")
        make_output_nonblocking()
        configure_logging(node)
        return self.serve(options, notices, node)

    def parser(self) -> argparse.ArgumentParser:
        """Add ``--submit`` to the options of the command."""
        parser = super().parser()
        parser.add_argument(_SUBMIT, nargs=argparse.REMAINDER, metavar="...", help=f"last option: {self.submit_help}")
        return parser

    def _options(self, arguments: Sequence[str]) -> argparse.Namespace:
        # argparse would take options of sbatch for options of this command.
        own = list(arguments).index(_SUBMIT) if _SUBMIT in arguments else len(arguments)
        options = self.parser().parse_args(arguments[:own])
        options.submit = arguments[own + 1 :]
        if own < len(arguments) and not options.submit:
            raise UsageError(f"{_SUBMIT}: name a batch script, as in {_SUBMIT} {self.submit_example}")
        self.check(options)
        return options
