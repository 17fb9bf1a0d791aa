"""``slurm-elastic shrink``: gives nodes of a run back."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.cli._resize import add_nodes, number, resize_run

_EXAMPLES = """\
  slurm-elastic shrink 1234 --nodes 2
"""


class Shrink(Command):
    """Cancels jobs of ``grow`` that have not started, and makes nodes leave with notice, those of the newest job first.

    A job ends when all of its nodes have left; until then it keeps those that have.
    """

    name = "shrink"
    summary = "give nodes of a run back without losing a step, those of the newest job first"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        add_nodes(parser)

    def run(self, arguments: Sequence[str]) -> int:
        """Ask the nodes to leave, and print which."""
        namespace = self.parser().parse_args(arguments)
        return resize_run(namespace, {}, change=-number("--nodes", namespace.nodes))
