"""The command line of ``slurm-elastic agent``: torchrun's own parser and a few options beside."""

from __future__ import annotations

import argparse
import os

from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from slurm_elastic.cli._command import Parser
from slurm_elastic.errors import UsageError

__all__ = ["agent_parser"]

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
"""Options whose absence has a meaning of its own here."""

_EPILOG = """\
What Slurm knows need not be said: nodes, workers per node (its GPUs), run id, endpoint. Every option may
also be given as PET_<OPTION> in the environment, as with torchrun.

examples:
  srun slurm-elastic agent train.py --lr 1e-3
  slurm-elastic agent --nnodes 2:4 --max-restarts 3 train.py
  slurm-elastic agent --nproc-per-node 2 -m package.train
  slurm-elastic agent --interface ib0 --preload numpy,transformers train.py
"""


def agent_parser() -> argparse.ArgumentParser:
    """Return the parser. Options that were not given and that Slurm fills in are None.

    Its defaults come from PET_* variables as they are now. A wrong command line raises UsageError.
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
    )
    # torchrun's defaults cannot be told from values given; those from PET_* variables are given.
    parser.set_defaults(**{name: os.environ.get(f"PET_{name.upper()}") for name in _FILLED_IN})
    group = parser.add_argument_group("options beside those of torchrun")
    group.add_argument(
        "--run-id",
        "--run_id",
        dest="rdzv_id",
        action=env,
        help="same as --rdzv-id; jobs with the same run id and run directory are one run (default: the job's id)",
    )
    group.add_argument(
        "--run-dir",
        "--run_dir",
        action=env,
        metavar="DIR",
        help="a directory that all nodes share; the run keeps its state and logs in DIR/elastic-runs/<run id> "
        "(default: where sbatch was called)",
    )
    group.add_argument(
        "--node-unit",
        "--node_unit",
        action=env,
        metavar="K",
        help="rounds have a multiple of K nodes; the others are spares (default: 1)",
    )
    group.add_argument(
        "--valid-nodes",
        "--valid_nodes",
        action=env,
        metavar="N,N,...",
        help="rounds have one of these numbers of nodes, as 2,4,8; the others are spares (default: any)",
    )
    group.add_argument(
        "--interface", action=env, metavar="NAME", help="network interface by which others reach this node, as ib0"
    )
    group.add_argument(
        "--node-pattern",
        "--node_pattern",
        action=env,
        metavar="PATTERN",
        help="name of a node in the data network, as {node}-ib",
    )
    group.add_argument(
        "--leader-node",
        "--leader_node",
        action=env,
        metavar="NODE",
        help="the agent on this node leads the run at first (default: the job's first node; in an array the first to "
        "come)",
    )
    group.add_argument(
        "--start",
        action=env,
        default="warm",
        choices=["warm", "cold"],
        help="warm: fork workers from a process that has torch imported; cold: a fresh Python each (default: warm)",
    )
    group.add_argument(
        "--preload",
        action=env,
        metavar="MODULES",
        help="modules that a warm start imports beside torch, as numpy,my.data",
    )
    group.add_argument(
        "--worker-signal",
        "--worker_signal",
        action=env,
        metavar="NAME",
        help="also send this signal, as SIGUSR1, to the workers when a planned end of their round is announced; they "
        "then have --shutdown-timeout seconds to end by themselves",
    )
    group.add_argument(
        "--no-watchdog",
        "--no_watchdog",
        action=check_env,
        help="do not look for workers whose torch.distributed.elastic.timer expired",
    )
    group.add_argument(
        "--max-requeues",
        "--max_requeues",
        action=env,
        metavar="N",
        help="how often the job is requeued because of its time limit (default: 10); preemptions are not counted",
    )
    group.add_argument(
        "--warning",
        action=env,
        metavar="SECONDS",
        help="the time in sbatch --signal=USR2@SECONDS (default: 120)",
    )
    group.add_argument(
        "--grace",
        action=env,
        metavar="SECONDS",
        help="from SIGTERM to the end, where Slurm cannot be asked (default: 30)",
    )
    group.add_argument(
        "--hang-timeout",
        "--hang_timeout",
        action=env,
        metavar="SECONDS",
        help="kill a worker that takes no step for so long, if its script uses slurm_elastic.trainer; auto: ten times "
        "the longest pause so far, at least 5 minutes (default: off)",
    )
    _add_health(group)
    return parser


def _add_health(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--health-bind",
        "--health_bind",
        action=env,
        metavar="ADDRESS",
        help="address of the health port; 0.0.0.0 for all of this node's (default: 127.0.0.1)",
    )
    group.add_argument(
        "--health-port",
        "--health_port",
        action=env,
        metavar="PORT",
        help="port that answers /healthz, /readyz, /status, /metrics and /stacks (default: a free one, see health/ in "
        "the run directory)",
    )
    group.add_argument(
        "--health-token-file",
        "--health_token_file",
        action=env,
        metavar="FILE",
        help="what clients have to show, see the reference (default: health-token in the run directory)",
    )
    group.add_argument("--no-health", "--no_health", action=check_env, help="open no health port")
