"""Snapshots as a feature of an agent: `slurm-elastic agent` hands it to `agent.run`, which knows the hooks alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from slurm_elastic.agent.features import Feature, Snapshots
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.health.state import Readings
from slurm_elastic.agent.lifecycle.actions import AnnounceLeave
from slurm_elastic.agent.option_values import OptionValues
from slurm_elastic.agent.signals import record_signals
from slurm_elastic.control.worker_side import StopReason
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.lineage import SLOTS, Group, choose, read_origin
from slurm_elastic.snapshot.transfer import Settings

logger = logging.getLogger("slurm_elastic")


class SnapshotFeature(Feature):
    """Keeps the snapshots of workers in memory for the workers of later rounds; OSError if that cannot be made."""

    def __init__(
        self,
        rendezvous: RendezvousConfig,
        directory: Path,
        is_leaving: Callable[[], bool],
        replicas: int = 0,
        fork_server: ForkServer | None = None,
        slots: int = SLOTS,
    ) -> None:
        self._margin, self._is_leaving = rendezvous.options.leave_margin, is_leaving
        self._until: float | None = None
        self._members_leave: bool | None = None
        run = rendezvous
        agent = Settings(run.run_dir.secret(), run.incarnation, run.agent, run.node, run.address, domain=run.domain)
        self._memory = AgentMemory(
            directory,
            agent,
            replicates=replicas > 0,
            slots=slots,
            fewest_nodes=run.min_nodes,
            fork=None if fork_server is None else fork_server.fork_child,
        )

    def inventory(self) -> str:
        return self._memory.inventory(self._is_leaving, members_leave=self._members_leave)

    def round_formed(self, assignment: Assignment, environments: Mapping[int, dict[str, str]]) -> None:
        self._members_leave = None
        place = assignment.place
        group = Group(place.rank, assignment.nodes, place.local_world_size, place.base_rank, assignment.world_size)
        variables = self._memory.begin(assignment.round, assignment.origin, group)
        for environment in environments.values():
            environment.update(variables)

    def stop_agreed(self, reason: str) -> None:
        self._members_leave = reason != StopReason.NODE_JOINED

    def exits_expected(self, *, unplanned: bool) -> None:
        if unplanned:
            self._members_leave = False

    def leave_announced(self, leave: AnnounceLeave) -> None:
        # The other half of the margin is for the end of the agent and of its job.
        self._until = time.monotonic() + leave.seconds - min(self._margin / 2, leave.seconds / 4)

    def run_ended(self) -> None:
        self.missing = self._memory.close(self._until, self._is_leaving)

    def status(self, readings: Readings) -> Readings:
        size, safe = self._memory.held()
        return replace(readings, snapshot_bytes=size, safe_step=safe)


def _make_feature(
    values: OptionValues, rendezvous: RendezvousConfig, fork_server: ForkServer, directory: Path
) -> SnapshotFeature | None:
    replicas, slots = values.snapshot_replicas, values.snapshot_slots
    try:
        return SnapshotFeature(rendezvous, directory, _is_leaving, replicas, fork_server, slots)
    except OSError as error:
        logger.warning("%s holds no snapshots: %s", rendezvous.node, error)
        return None


def _is_leaving() -> bool:
    return record_signals().first() is not None


def _step_of(origin: str) -> int | None:
    copy = read_origin(origin).copy
    return None if copy is None else copy.id.step


SNAPSHOTS = Snapshots(choose, _step_of, _make_feature)
