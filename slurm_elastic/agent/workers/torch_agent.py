"""torch's agent under public names: the one file that uses its private ones.

Read in torch 2.13 (distributed/elastic/agent/server/api.py and local_elastic_agent.py), and guarded by
tests/unit/agent/test_torch_hooks.py, which fails when torch changes it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record as record_event
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

from slurm_elastic.agent.forkserver.worker_processes import WorkerProcesses
from slurm_elastic.agent.watchdog.timers import Request
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rendezvous.worker_store import ServedStore


class TorchAgent(LocalElasticAgent):
    """torch's agent with another main loop; it keeps the state that torch's events and metrics are made of.

    Args:
        clean_up: Ends the workers that still run, with a signal and the seconds until SIGKILL, and frees everything;
            called at the end of `run`, also after an error.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        main_loop: Callable[[], RunResult],
        clean_up: Callable[[signal.Signals, int], None],
        shutdown_timeout: int = 30,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._main_loop, self._clean_up, self._seconds = main_loop, clean_up, shutdown_timeout
        self._served: ServedStore | None = None

    @property
    def spec(self) -> WorkerSpec:
        """torch's description of the workers."""
        return self._worker_group.spec

    @property
    def script(self) -> str:
        """The name of the workers' script, module, program or function."""
        entrypoint, args = self.spec.entrypoint, self.spec.args
        if callable(entrypoint):
            return getattr(entrypoint, "__name__", "")
        # torch's config_from_args begins the arguments of Python with -u (torch/distributed/run.py, 2.13).
        words = [entrypoint or "", *map(str, args)]
        python = words[1:2] == ["-u"]
        return next((Path(word).name for word in words[python:] if word and not word.startswith("-")), "")

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers of the newest round on this node, by local rank."""
        return self._worker_group.workers

    def serve_store(self, store: ServedStore | None) -> None:
        """Serve the worker store of a round; with None, stop serving that of the last one.

        Clients that block in the store then return from C++ code, and can handle a signal.
        """
        if self._served is not None:
            self._served.close()
        self._served = store

    def describe_round(self, assignment: Assignment) -> None:
        """Set torch's description of the round that begins, and of its workers on this node."""
        place = assignment.place
        self._group.group_rank, self._group.group_world_size = place.rank, assignment.nodes
        self._group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=place.base_rank + local_rank,
                role_rank=place.role_base_rank + local_rank,
                world_size=assignment.world_size,
                role_world_size=place.role_world_size,
            )
            for local_rank in range(place.local_world_size)
        ]
        # Restarts are counted for the run: the number is the same on every node, whichever node has failed.
        self._remaining_restarts = self.spec.max_restarts - assignment.restarts

    def set_local_rank(self, env: dict[str, str], local_rank: int) -> None:
        """Set LOCAL_RANK, and with ``--virtual-local-rank`` the one device that the worker sees."""
        self._set_local_rank_env(cast(dict[str, str | None], env), local_rank, self.spec)

    def workers_started(self, pids: Mapping[int, int]) -> None:
        """Note the processes of the workers, by local rank, and record torch's events of their start."""
        for local_rank, pid in pids.items():
            worker = self.workers[local_rank]
            worker.id = pid
            record_event(self._construct_event("START", EventSource.WORKER, worker), self.spec.event_log_handler)

    def poll_workers(self, processes: WorkerProcesses | None) -> RunResult:
        """Return how the workers have ended so far; never blocks."""
        self._pcontext = cast(PContext, processes)
        try:
            result: RunResult = self._monitor_workers(self._worker_group)
            return result
        finally:
            self._pcontext = None

    def record_end(self, *, succeeded: bool) -> None:
        """Record torch's event of the agent's own end, as torch's launch_agent does (torch 2.13, launcher/api.py)."""
        event = self.get_event_succeeded() if succeeded else self.get_event_failed()
        record_event(event, self.spec.event_log_handler)

    def record_watchdog(self, name: str, request: Request | None) -> None:
        """Record an event of the watchdog as one of torch's own; from any thread."""
        asked = request and FileTimerRequest(request.pid, request.scope, request.expires_at, request.signal)
        self._log_watchdog_event(name, asked)

    # Methods that torch calls.

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self._main_loop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # torch 2.11 passes no timeout, and later ones that of a base class which has not been told.
        self._clean_up(death_sig, self._seconds)

    @property
    def _group(self) -> Any:
        # torch annotates attributes of the group as None that it assigns later.
        return self._worker_group
