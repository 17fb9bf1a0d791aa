"""The meaning of the agent's options where Slurm completes them; without torch, as other commands need it too."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.slurm import Controller, SignalDefaults, SlurmJob

__all__ = [
    "LOCAL_RESTARTS",
    "NotifySettings",
    "RequeuePolicy",
    "base_directory",
    "leader_node",
    "node_range",
    "notify_settings",
    "require_known",
    "requeue_policy",
]

LOCAL_RESTARTS = "SLURM_ELASTIC_LOCAL_RESTARTS"
"""The variable that says how often all agents of a run on one machine have started again; see `cli.local_agent`."""

_log = logging.getLogger(__name__)

_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")
_MAX_REQUEUES = 10
_MAX_EXCLUDED = 2


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """The user's wishes about notifications.

    Attributes:
        target: A command for /bin/sh, or a URL.
        after: Seconds after which a wait is worth a notification.
    """

    target: str
    after: float = 600.0


def notify_settings(target: str | None, after: str | None) -> NotifySettings | None:
    """Return the meaning of ``--notify`` and ``--notify-after``; None for no notifications.

    Raises:
        UsageError: One of them is missing or wrong.
    """
    if not target:
        if after:
            raise UsageError("--notify-after needs --notify")
        return None
    try:
        seconds = float(after or 600)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e9:
        raise UsageError(f"--notify-after {after!r} is no number of seconds; write it as in 600")
    return NotifySettings(target, seconds)


def base_directory(run_dir: str | None, job: SlurmJob | None) -> Path:
    """Return ``--run-dir``, else the directory that sbatch was called in, else the current one."""
    return Path(run_dir or (job.submit_dir if job else None) or Path.cwd())


def node_range(text: str | None, most: int) -> tuple[int, int]:
    """Return the least and the most nodes of ``--nnodes``; 1 to ``most`` if it is not given.

    Raises:
        UsageError: it is not ``N`` or ``MIN:MAX``, or nothing fits.
    """
    if text is None:
        return 1, most
    match = _NODES.fullmatch(text.strip())
    if not match:
        raise UsageError(f"--nnodes {text!r} is neither a number nor MIN:MAX; write it as in 4 or 2:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if least == 0:
        raise UsageError(f"--nnodes {text}: a run needs at least one node; write it as in 1:{max(most, 1)}")
    if least > most:
        raise UsageError(f"--nnodes {text}: the minimum is above the maximum; write it as in {most}:{least}")
    return least, most


def leader_node(given: str | None, job: SlurmJob | None, node: str, *, shared: bool) -> str:
    """Return the node whose agent leads the first term of this incarnation of the run.

    Args:
        given: ``--leader-node``; without it the first node of the job.
        job: the Slurm job this agent runs in; None outside Slurm.
        node: Slurm's name of this node.
        shared: True if other jobs bring nodes to the run, too; then the leader's node may be one of theirs.

    Raises:
        UsageError: the job, which is the whole run, has no such node.
    """
    nodes = job.nodes if job is not None else (node,)
    if not given:
        return nodes[0]
    if given in nodes or (shared and job is not None):
        return given
    if job is None:
        raise UsageError(f"--leader-node {given}: outside Slurm there is one node, {node}; leave the option out")
    if job.restart_count:
        # What was right when the job was submitted must not fail the job because Slurm gave it other nodes since.
        if job.node_rank == 0:
            _log.warning("--leader-node %s is not among the nodes of this start: %s leads", given, nodes[0])
        return nodes[0]
    raise UsageError(f"--leader-node {given} is not a node of this job; it has {', '.join(nodes)}")


def require_known(name: str, controller: Controller) -> None:
    """Refuse a leader's node that Slurm does not know: no agent would ever come from there.

    Raises:
        UsageError: there is no such node. Where Slurm cannot be asked the name is believed.
    """
    if controller.knows_node(name) is False:
        raise UsageError(f"--leader-node {name}: Slurm knows no such node; see sinfo --Node")


@dataclass(frozen=True, slots=True)
class RequeuePolicy:
    """The user's wishes about the end of a job.

    Attributes:
        max_requeues: how often the job is requeued because of its time limit.
        max_excluded: how many bad nodes the job excludes when it starts again.
        meaning: of signals, where Slurm does not tell.
    """

    max_requeues: int = _MAX_REQUEUES
    meaning: SignalDefaults = field(default_factory=SignalDefaults)
    max_excluded: int = _MAX_EXCLUDED


def requeue_policy(
    max_requeues: str | None, grace: str | None, warning: str | None, max_excluded: str | None = None
) -> RequeuePolicy:
    """Read ``--max-requeues``, ``--grace``, ``--warning`` and ``--max-excluded``; None for those that were not given.

    Raises:
        UsageError: a value is no number, or negative.
    """
    default = SignalDefaults()
    return RequeuePolicy(
        max_requeues=_count("--max-requeues", max_requeues, _MAX_REQUEUES),
        meaning=SignalDefaults(
            _seconds("--grace", grace, default.grace), _seconds("--warning", warning, default.warning)
        ),
        max_excluded=_count("--max-excluded", max_excluded, _MAX_EXCLUDED),
    )


def _count(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{option} {text!r} is no number; give 0 or more")
    return int(text)


def _seconds(option: str, text: str | None, default: float) -> float:
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(f"{option} {text!r} is no number of seconds; give 0 or more")
    return seconds
