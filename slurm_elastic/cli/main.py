"""``slurm-elastic VERB ...``: finds the verb, prints errors."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from slurm_elastic.cli._command import Parser, Verb, reported
from slurm_elastic.errors import UsageError, did_you_mean

__all__ = ["main"]

_VERBS = ("agent", "drain", "etcd", "requeue", "store", "submit", "template", "verdict")
"""Each is a module of this package with a class of that name. Only what is asked for is imported: until the agent
records signals, one would end it."""

_EXAMPLES = """\
examples:
  slurm-elastic template allocation > elastic.sbatch     a batch script to adapt to your site, once
  sbatch --nodes=2-8 --gpus-per-node=4 elastic.sbatch train.py --lr 1e-3
  slurm-elastic agent train.py --lr 1e-3                 one node, with or without Slurm

'slurm-elastic VERB --help' says more about a verb.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return its exit code."""
    return reported(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _VERBS:
        # What a parser would say, without the milliseconds that one takes to be made: an agent's workers wait for it.
        name, arguments = words[0], words[1:]
    else:
        options = _parser().parse_args(words)
        name, arguments = options.verb, options.arguments
    verb = _verb(name)
    if argv is None:
        verb.execute(arguments)
    return verb.run(arguments)


class _MainParser(Parser):
    def format_help(self) -> str:
        """Describe the verbs, too."""
        verbs = "\n".join(f"  {name:<12}{_imported(name).summary}" for name in _VERBS)
        self.description = f"PyTorch training on Slurm that grows, shrinks and comes back.\n\nverbs:\n{verbs}"
        return super().format_help()


def _parser() -> Parser:
    from slurm_elastic._version import __version__

    parser = _MainParser(
        prog="slurm-elastic",
        usage="slurm-elastic [--version] [--help] VERB ...",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slurm-elastic {__version__}")
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _imported(name: str) -> Verb:
    verb: type[Verb] = getattr(importlib.import_module(f"slurm_elastic.cli.{name}"), name.capitalize())
    return verb()


def _verb(name: str) -> Verb:
    if name in _VERBS:
        return _imported(name)
    mend = did_you_mean(name, _VERBS, otherwise=f"there are {', '.join(_VERBS)}")
    raise UsageError(f"no verb {name!r}; {mend}")
