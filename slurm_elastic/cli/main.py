"""``slurm-elastic VERB ...``: finds the verb, prints errors."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from slurm_elastic._version import __version__
from slurm_elastic.cli.agent import Agent
from slurm_elastic.cli.base import Parser, Verb
from slurm_elastic.cli.drain import Drain
from slurm_elastic.cli.etcd import Etcd
from slurm_elastic.cli.requeue import Requeue
from slurm_elastic.cli.store import Store
from slurm_elastic.cli.submit import Submit
from slurm_elastic.cli.template import Template
from slurm_elastic.cli.verdict import Verdict
from slurm_elastic.errors import SlurmElasticError, UsageError

__all__ = ["main"]

_VERBS: dict[str, Verb] = {
    verb.name: verb for verb in (Agent(), Drain(), Etcd(), Requeue(), Store(), Submit(), Template(), Verdict())
}

_EXAMPLES = """\
examples:
  slurm-elastic template allocation > elastic.sbatch     a batch script to adapt to your site, once
  sbatch --nodes=2-8 --gpus-per-node=4 elastic.sbatch train.py --lr 1e-3
  slurm-elastic agent train.py --lr 1e-3                 one node, with or without Slurm

'slurm-elastic VERB --help' says more about a verb.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return its exit code."""
    try:
        options = _parser().parse_args(argv)
        return _verb(options.verb).run(options.arguments)
    except SlurmElasticError as error:
        print(f"slurm-elastic: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return int(error.exit_code)


def _parser() -> Parser:
    verbs = "\n".join(f"  {verb.name:<12}{verb.summary}" for verb in _VERBS.values())
    parser = Parser(
        prog="slurm-elastic",
        usage="slurm-elastic [--version] [--help] VERB ...",
        description=f"PyTorch training on Slurm that grows, shrinks and comes back.\n\nverbs:\n{verbs}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slurm-elastic {__version__}")
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _verb(name: str) -> Verb:
    if name in _VERBS:
        return _VERBS[name]
    near = difflib.get_close_matches(name, _VERBS, n=1)
    mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(_VERBS)}"
    raise UsageError(f"no verb {name!r}; {mend}")
