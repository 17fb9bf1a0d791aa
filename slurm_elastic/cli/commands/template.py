"""``slurm-elastic template`` and ``slurm-elastic example``: print a file that comes with the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from slurm_elastic.cli._command import Command, Parser
from slurm_elastic.submission.batch_script import EXAMPLES, TEMPLATES, ShippedFiles


class Template(Command):
    """Prints one template, or a list of all templates."""

    name = "template"
    summary = "print a batch script to adapt to your site, or list all of them"
    examples = """\
  slurm-elastic template
  slurm-elastic template allocation > elastic.sbatch
"""
    files: ClassVar[ShippedFiles] = TEMPLATES

    def add_options(self, parser: Parser) -> None:
        parser.add_argument("name", nargs="?", help=f"name of the {self.files.kind}; without it, print a list of all")

    def completion_parser(self) -> Parser:
        parser = self.parser()
        (name,) = (action for action in parser._actions if action.dest == "name")
        name.choices = self.files.names()
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        name = self.parser().parse_args(arguments).name
        if name is not None:
            sys.stdout.write(self.files.read(name))
            return 0
        names = self.files.names()
        width = max(14, *(len(name) + 2 for name in names))
        for name in names:
            print(f"{name:<{width}}{self.files.summary(name)}")
        return 0


class Example(Template):
    """Prints one example script, or a list of all examples."""

    name = "example"
    summary = "print a training script to start from, or list all of them"
    examples = """\
  slurm-elastic example
  slurm-elastic example digits > digits.py
"""
    files = EXAMPLES
