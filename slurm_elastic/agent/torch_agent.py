"""torch's agent, by names of our own: the one file that touches what is private to it.

Read in torch 2.13 (distributed/elastic/agent/server/api.py and local_elastic_agent.py), and guarded by
tests/unit/agent/test_torch_hooks.py, which fails when torch changes it.
"""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record as record_event
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import PContext

from slurm_elastic.agent.worker_processes import WorkerProcesses
from slurm_elastic.rendezvous.transport.messages import Placed

if TYPE_CHECKING:
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

__all__ = ["TorchAgent"]


class TorchAgent(LocalElasticAgent):
    """Has torch's `run` call a loop of our own, and tells torch what its events and metrics are made of."""

    @abstractmethod
    def _take_part(self) -> RunResult:
        """Be an agent, to the end; called once, by `run`."""

    @abstractmethod
    def _clear_away(self, number: signal.Signals, timeout: int) -> None:
        """Leave nothing behind; called by `run` at the very end, whatever happened.

        Args:
            number: the signal for workers that still run.
            timeout: seconds that they have to end by it.
        """

    @property
    def _spec(self) -> WorkerSpec:
        """torch's description of the workers."""
        return self._worker_group.spec

    @property
    def _own_workers(self) -> Sequence[Worker]:
        """The workers of the newest round on this node, by local rank."""
        return self._worker_group.workers

    def _serve(self, store: TCPStore | None) -> None:
        """Serve the store of a round, or with None that of the last one no longer.

        With the last reference the server ends. Clients that wait in it then come back from C++ code, so that they can
        heed a signal.
        """
        self._group.store = store

    def _take_place(self, placed: Placed) -> None:
        """Describe the round that begins, and the workers that it has here."""
        place = placed.place
        self._group.group_rank, self._group.group_world_size = place.rank, placed.nodes
        self._group.master_addr, self._group.master_port = placed.store_address, placed.store_port
        self._group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=place.base_rank + local_rank,
                role_rank=place.role_base_rank + local_rank,
                world_size=placed.world_size,
                role_world_size=place.role_world_size,
            )
            for local_rank in range(place.local_world_size)
        ]
        # One number for the run, the same on every node, whichever of them failed.
        self._remaining_restarts = self._spec.max_restarts - placed.restarts

    def _number_device(self, env: dict[str, str], local_rank: int) -> None:
        """Set LOCAL_RANK, and with ``--virtual-local-rank`` the one device that the worker sees."""
        self._set_local_rank_env(cast(dict[str, str | None], env), local_rank, self._spec)

    def _started(self, pids: Mapping[int, int]) -> None:
        """Take note of the processes of the workers, by local rank, and record torch's events of their start."""
        for local_rank, pid in pids.items():
            worker = self._own_workers[local_rank]
            worker.id = pid
            record_event(self._construct_event("START", EventSource.WORKER, worker), self._spec.event_log_handler)
        self._is_in(WorkerState.HEALTHY)

    def _is_in(self, state: WorkerState) -> None:
        """Take note of the state of the workers, which torch's last event tells."""
        self._group.state = state

    def _result_of(self, processes: WorkerProcesses | None) -> RunResult:
        """What has become of the workers so far; never blocks."""
        self._pcontext = cast(PContext, processes)
        try:
            result: RunResult = self._monitor_workers(self._worker_group)
            return result
        finally:
            self._pcontext = None

    def _record_watchdog(self, name: str, request: FileTimerRequest | None) -> None:
        """Record one of torch's own watchdog events."""
        self._log_watchdog_event(name, request)

    # What torch calls.

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self._take_part()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._clear_away(death_sig, timeout)

    @property
    def _group(self) -> Any:
        # torch annotates attributes of it as None that it sets itself.
        return self._worker_group
