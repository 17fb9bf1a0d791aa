"""``slurm-elastic resize``: gives a run another number of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._resize import number, resize_run, split
from slurm_elastic.cli._run_view import add_run

_EXAMPLES = """\
  slurm-elastic resize 1234 6
  slurm-elastic resize 1234 6 --partition=low
"""


class Resize(Command):
    """Does what ``grow`` or ``shrink`` would do."""

    name = "resize"
    summary = "grow or shrink a run to a number of nodes; further options are for sbatch"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_run(parser)
        parser.add_argument("size", metavar="N", help="nodes that the run shall have, with those asked for before")

    def run(self, arguments: Sequence[str]) -> int:
        """Ask for the difference, and print what was asked for."""
        words, options = split(arguments, ("--run-dir",))
        namespace = self.parser().parse_args(words)
        return resize_run(namespace, options, size=number("N", namespace.size))
