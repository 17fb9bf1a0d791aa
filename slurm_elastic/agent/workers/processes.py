"""The worker processes of one round on one node: their environment, their start, and what the agent does with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.numa.binding import NumaOptions

from slurm_elastic.agent.forkserver.linux import process_state
from slurm_elastic.agent.forkserver.worker_processes import numa_cpus
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.slurm.address import data_network


def worker_environment(
    spec: WorkerSpec, worker: Worker, assignment: Assignment, config: RendezvousConfig, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of one worker: torchrun's (torch 2.13, local_elastic_agent.py, _start_workers), and ours.

    Ours begin with SLURM_, because that prefix survives ``--export=NONE`` when a worker starts a step of its own.
    """
    place = assignment.place
    environment = {
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(place.rank),
        # torchrun does not set this; Composer reads it (mosaicml 0.32, composer/utils/dist.py, get_node_rank).
        "NODE_RANK": str(place.rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": assignment.store_address,
        "MASTER_PORT": str(assignment.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "SLURM_ELASTIC_RUN_ID": config.run_id,
        "SLURM_ELASTIC_RUN_DIR": str(config.run_dir.path),
        "SLURM_ELASTIC_ROUND": str(assignment.round),
        "SLURM_ELASTIC_REASON": assignment.reason.value,
        "SLURM_ELASTIC_NODE": config.node,
        "SLURM_ELASTIC_TERM": str(assignment.epoch),
        # The older name, which training scripts may read.
        "SLURM_ELASTIC_EPOCH": str(assignment.epoch),
        "SLURM_ELASTIC_SCOPE": config.incarnation,
        "SLURM_ELASTIC_DOMAIN": place.domain,
        "SLURM_ELASTIC_DOMAIN_RANK": str(place.domain_base_rank + worker.local_rank),
        "SLURM_ELASTIC_DOMAIN_SIZE": str(place.domain_world_size),
    }
    if "OMP_NUM_THREADS" in environ:
        environment["OMP_NUM_THREADS"] = environ["OMP_NUM_THREADS"]
    return {**data_network(config.interface, config.gloo_interface, environ), **environment}


def require_numa_binding(workers: int, options: NumaOptions | None) -> None:
    """Have torch choose the CPUs of each worker now, if ``--numa-binding`` asks for it; later starts use its choice.

    Raises:
        UsageError: torch cannot bind workers on this node.
    """
    if options is None:
        return
    try:
        numa_cpus(workers, options)
    except Exception as error:
        # Without a GPU torch 2.13 raises an AssertionError, 2.14 a RuntimeError.
        raise UsageError(
            f"--numa-binding={options.affinity_mode.value} cannot bind the workers of this node: {error}; "
            "leave the option out, or fix that"
        ) from None


def survivors(node: str, pids: Iterable[int]) -> str:
    """Return one line about processes that have survived SIGKILL."""
    shown = []
    for pid in pids:
        process = process_state(pid)
        # proc_pid_stat(5)
        waits = process is not None and process.state == "D"
        shown.append(f"{pid}{' in uninterruptible sleep' if waits else ''}")
    return (
        f"{node} has processes that SIGKILL does not end ({', '.join(shown)}), so it leaves the run; look at the node"
    )
