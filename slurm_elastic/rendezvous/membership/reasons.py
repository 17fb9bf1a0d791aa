"""The reasons of rounds and of leaves."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """The reason of a round; workers see it as SLURM_ELASTIC_REASON."""

    START = "start"
    NODE_JOINED = "node_joined"
    NODE_LEFT = "node_left"
    NODE_LOST = "node_lost"
    WORKER_FAILED = "worker_failed"
    REQUEUED = "requeued"


class LeaveReason(enum.Enum):
    """The reason of an announced leave."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    DRAINED = "drained"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    NODE_LEFT = "node_left"
    """The cause is not known yet."""
    FINISHED = "finished"
    FAILED = "failed"
