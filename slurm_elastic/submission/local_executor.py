"""Executors for development: several agents on this machine, or this process as the only worker."""

from __future__ import annotations

import shlex
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from submitit.core import core, utils
from submitit.local import debug, local

from slurm_elastic.errors import UsageError
from slurm_elastic.submission.executor import AgentOptions
from slurm_elastic.submission.job import LocalElasticJob
from slurm_elastic.submission.payload import Payload, Script
from slurm_elastic.submission.plan import NodeRange


class LocalElasticExecutor(local.LocalExecutor):
    """Runs on this machine without Slurm; each agent represents a node.

    It accepts the parameters of `ElasticExecutor` and those of submitit's LocalExecutor: ``timeout_min``,
    ``gpus_per_node``, ``visible_gpus``, ``setup``. It ignores parameters of Slurm.

    Args:
        max_num_timeout: How often the run starts again after a time-out, as with submitit's executors.
        folder: As for `ElasticExecutor`, like all arguments.
        min_nodes: See there.
        max_nodes: See there; the executor starts this number of agents.
        workers_per_node: See there.
        max_restarts: See there.
        agent_arguments: See there.
        max_pickle_size_gb: See there.

    Raises:
        UsageError: The constructor and every method raise it for mistakes of the user.
    """

    job_class = LocalElasticJob

    def __init__(
        self,
        folder: str | Path,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        workers_per_node: int | None = None,
        *,
        max_restarts: int = 0,
        agent_arguments: Sequence[str] = (),
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
    ) -> None:
        most = max_nodes if max_nodes is not None else min_nodes or 1
        self.nodes = NodeRange(most if min_nodes is None else min_nodes, most)
        self.agent = AgentOptions(workers_per_node, max_restarts, tuple(agent_arguments))
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)

    def submit(self, fn: Callable[..., core.R], *args: Any, **kwargs: Any) -> LocalElasticJob[core.R]:
        """Submit a function that every worker calls with these arguments."""
        return cast("LocalElasticJob[core.R]", super().submit(fn, *args, **kwargs))

    def submit_script(self, path: str | Path, *arguments: str) -> LocalElasticJob[None]:
        """Submit a script that every worker runs."""
        return self.submit(Script(str(path), arguments))

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if kwargs.get("tasks_per_node", 1) != 1:
            raise UsageError(
                f"tasks_per_node={kwargs['tasks_per_node']}: give workers_per_node; each agent starts them"
            )
        if "nodes" in kwargs:
            raise UsageError("the number of nodes is given twice; leave nodes out and give max_nodes")
        mine = {name: value for name, value in kwargs.items() if not name.startswith("slurm_")}
        super()._internal_update_parameters(**mine)

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _submit_one(self, delayed: utils.DelayedSubmission) -> core.Job[Any]:
        delayed.set_timeout(self.parameters.get("timeout_min", 0), self.max_num_timeout)
        uid = uuid.uuid4().hex
        payload = Payload(delayed, self.folder, uid, self.max_pickle_size_gb)
        base = utils.JobPaths.get_first_id_independent_folder(self.folder)
        words = (self.nodes.for_agents, *self.agent.words(Path(base)), *payload.agent_options, *payload.words)
        command = shlex.join(
            [sys.executable, "-m", "slurm_elastic.cli.local_agent", uid, str(self.max_num_timeout), str(base), *words]
        )
        process = local.start_controller(
            folder=self.folder,
            command=command,
            tasks_per_node=self.nodes.most,
            cuda_devices=self._devices(),
            timeout_min=self.parameters.get("timeout_min", 2.0),
            signal_delay_s=self.parameters.get("signal_delay_s", 30),
            stderr_to_stdout=self.parameters.get("stderr_to_stdout", False),
            setup=self.parameters.get("setup", ()),
        )
        job: LocalElasticJob[Any] = LocalElasticJob(folder=self.folder, job_id=str(process.pid), process=process)
        job.run_id = f"{process.pid}-{uid[:8]}"
        payload.keep_for(job)
        return job

    def _devices(self) -> str:
        """Return CUDA_VISIBLE_DEVICES as submitit's LocalExecutor sets it (submitit/local/local.py, 1.5.4)."""
        count = self.parameters.get("gpus_per_node", 0)
        visible = self.parameters.get("visible_gpus", ())
        return ",".join(map(str, visible[:count] if visible else range(count)))


class DebugElasticExecutor(debug.DebugExecutor):
    """Runs in this process, as the only worker, when the caller asks for the result.

    It accepts the parameters of `ElasticExecutor`.
    """

    def __init__(self, folder: str | Path, *_given: Any, **_named: Any) -> None:
        super().__init__(folder)

    def submit_script(self, path: str | Path, *arguments: str) -> core.Job[None]:
        """Submit a script."""
        return self.submit(Script(str(path), arguments))

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        jobs = super()._internal_process_submissions(delayed_submissions)
        for job in jobs:
            assert isinstance(job, debug.DebugJob)
            function = job.submission().function
            if isinstance(function, Script):
                function.require_exists()
            # torch.distributed.init_process_group() needs the variables that an agent sets.
            job.environ.update(_only_worker(job.job_id))
        return jobs


def _only_worker(job_id: str) -> dict[str, str]:
    zeros = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "SLURM_ELASTIC_ROUND")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(zeros, "0"),
        **dict.fromkeys(ones, "1"),
        "MASTER_ADDR": "127.0.0.1",
        # The store of the only worker takes a free port when it is made: one chosen here may be taken by then.
        "MASTER_PORT": "0",
        "SLURM_ELASTIC_RUN_ID": job_id,
        "SLURM_ELASTIC_NODE": "localhost",
        "SLURM_ELASTIC_REASON": "start",
    }
