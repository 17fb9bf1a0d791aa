"""``slurm-elastic template``: prints a batch script to adapt."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurm_elastic.cli._command import Verb
from slurm_elastic.submission import templates

__all__ = ["Template"]

_EXAMPLES = """\
  slurm-elastic template
  slurm-elastic template allocation > elastic.sbatch
"""


class Template(Verb):
    """Prints one template, or the list of them."""

    name = "template"
    summary = "print a batch script to adapt to your site, or list them"

    def run(self, arguments: Sequence[str]) -> int:
        """Print to stdout."""
        parser = self.parser(examples=_EXAMPLES)
        parser.add_argument("name", nargs="?", help="which one; the list of them if left out")
        name = parser.parse_args(arguments).name
        if name is None:
            for one in templates.names():
                print(f"{one:<14}{templates.summary(one)}")
        else:
            sys.stdout.write(templates.read(name))
        return 0
