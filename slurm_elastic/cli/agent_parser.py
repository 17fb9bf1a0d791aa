"""The parser of ``slurm-elastic agent``: torchrun's own parser, and the options of `agent.option_table`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from slurm_elastic.agent.option_table import GROUPS
from slurm_elastic.cli._command import Parser
from slurm_elastic.cli._completion import add_print_completion
from slurm_elastic.errors import UsageError

_FILLED_IN = (
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_id",
    "rdzv_endpoint",
    "node_rank",
    "master_addr",
    "master_port",
    "redirects",
    "tee",
)
"""Options of torchrun that Slurm fills in where they are not given."""

_EPILOG = """\
Slurm's environment gives nodes, workers per node (one per GPU), run id and endpoint. Every option may also be given
as PET_<OPTION> in the environment, as with torchrun.

examples:
  srun slurm-elastic agent train.py --lr 1e-3
  slurm-elastic agent --nnodes 2:4 --max-restarts 3 train.py
  slurm-elastic agent --nproc-per-node 2 -m package.train
  slurm-elastic agent --interface ib0 --preload numpy,transformers train.py
"""


def agent_parser() -> argparse.ArgumentParser:
    """Return the parser. In its result, options that Slurm fills in are None where they are not given.

    Its defaults come from the PET_* variables of this moment. A wrong command line raises UsageError.

    Raises:
        UsageError: A PET_ variable of a switch is neither 0 nor 1.
    """
    try:
        torchrun = get_args_parser()
    except ValueError as error:
        # A switch such as PET_STANDALONE, which torch reads by int().
        raise UsageError(f"a PET_ variable of a switch is neither 0 nor 1: {error}") from None
    parser = Parser(
        prog="slurm-elastic agent",
        usage="slurm-elastic agent [options] train.py [arguments of train.py]",
        description="Train with one elastic agent on every node. Every option of torchrun works.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun],
        add_help=False,
        # An option of the same name that a release of torch adds does not stop the agent; --print-completion is one.
        conflict_handler="resolve",
    )
    # A default of torchrun cannot be distinguished from a given value; a PET_* variable is a given value.
    parser.set_defaults(**{name: os.environ.get(f"PET_{name.upper()}") for name in _FILLED_IN})
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            group.add_argument(
                *option.spellings,
                action=check_env if option.switch else env,
                help=option.help,
                **_given(dest=option.torchrun, metavar=option.metavar, choices=option.choices, default=option.default),
            )
    add_print_completion(group)
    # argparse has had to be given torchrun's first, so that those of the same name are ours.
    parser._optionals.title = "options of torchrun (by default Slurm tells nodes and workers, and --max-restarts is 0)"
    parser._action_groups.sort(key=lambda group: group is parser._optionals)
    return parser


def _given(**settings: Any) -> dict[str, Any]:
    """Leave out settings that are None: the action of a switch does not accept them."""
    return {name: value for name, value in settings.items() if value is not None}
