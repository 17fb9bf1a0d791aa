"""``slurm-elastic template``: prints a batch script to adapt to a site."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.submission import templates

_EXAMPLES = """\
  slurm-elastic template
  slurm-elastic template allocation > elastic.sbatch
"""


class Template(Command):
    """Prints one template, or a list of all templates."""

    name = "template"
    summary = "print a batch script to adapt to your site, or list all of them"
    examples = _EXAMPLES

    def add_options(self, parser: Parser) -> None:
        """See base class."""
        parser.add_argument("name", nargs="?", help="name of the template; without it, print a list of all")

    def completion_parser(self) -> argparse.ArgumentParser:
        """Let a shell complete the names of the templates."""
        parser = self.parser()
        (name,) = (action for action in parser._actions if action.dest == "name")
        name.choices = templates.names()
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Print the template that the command line names, or the list of templates."""
        name = self.parser().parse_args(arguments).name
        if name is None:
            for template in templates.names():
                print(f"{template:<14}{templates.summary(template)}")
        else:
            sys.stdout.write(templates.read(name))
        return 0
