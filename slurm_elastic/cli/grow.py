"""``slurm-elastic grow``: asks Slurm for more nodes for a run that trains."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._resize import add_nodes, number, resize_run, split

_EXAMPLES = """\
  slurm-elastic grow 1234 --nodes 2
  slurm-elastic grow 1234 --nodes 8 --partition=low --time=4:00:00
"""


class Grow(Command):
    """Submits a job whose agents join the run, with the batch script, options and arguments of the first one."""

    name = "grow"
    summary = "submit a job whose nodes join a run that trains; further options are for sbatch"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_nodes(parser)

    def run(self, arguments: Sequence[str]) -> int:
        """Submit the job, and print its id."""
        words, options = split(arguments, ("--run-dir", "--nodes"))
        namespace = self.parser().parse_args(words)
        return resize_run(namespace, options, change=number("--nodes", namespace.nodes))
