"""The settings of an agent, resolved once from its command line and Slurm's environment."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from slurm_elastic.agent import option_values
from slurm_elastic.agent.health.server import HealthSettings, health_settings
from slurm_elastic.agent.watchdog.stalls import HangTimeout, hang_timeout
from slurm_elastic.agent.watchdog.timers import is_enabled
from slurm_elastic.agent.workers import torchrun_options
from slurm_elastic.agent.workers.logs import RoundLogsSpecs, local_ranks, streams
from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.membership.agents import AgentIdentity
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import etcd_wanted
from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import AddressPreference, SlurmJob, compress, ephemeral_low, port_sequence

_log = logging.getLogger(__name__)

_LOCAL_NODE = "localhost"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Everything an agent knows before it connects to other agents."""

    job: SlurmJob | None
    """The job of this agent; None outside Slurm."""
    run_id: str
    """``--run-id``, else the id of the job, with that of the step but for 0, else a random one."""
    run_dir: RunDir
    """The run directory, not opened."""
    agent: str
    """The agent's identity ``<node>/<job id>.<restart count>/<pid>``; the job id is 0 outside Slurm."""
    node: str
    """Slurm's name of this node; ``localhost`` outside Slurm."""
    position: int
    """Index of `node` in the job's node list. 0 in an array element of one node and outside Slurm."""
    expected_nodes: tuple[str, ...]
    """The nodes whose agents the run waits for: those of the step, this node outside Slurm. Empty for an array that is
    one run, as its elements start when Slurm finds nodes for them."""
    restart_count: int
    """The number of times that Slurm has requeued the job; 0 outside Slurm."""
    leader_node: str
    """The node whose agent leads the first term. In a run of several jobs every agent may name its own node; then the
    first that starts leads."""
    ports: tuple[int, ...]
    """The ports that the leader tries, in this order; only one if ``--rdzv-endpoint`` names a port."""
    endpoint_host: str | None
    """The host of ``--rdzv-endpoint``; None if not given."""
    etcd: EtcdConfig | None
    """The etcd that keeps the records of the run; None if the run directory does."""
    address: AddressPreference
    """The user's choice of this node's address."""
    launch_config: LaunchConfig
    """torchrun's options as torch parses them."""
    entrypoint: Callable[..., Any] | str
    """The program or function that torchrun would start in each worker."""
    args: tuple[str, ...]
    values: option_values.OptionValues
    watchdog: bool
    """True if the agent looks for workers that hang."""
    hang_timeout: HangTimeout | None
    health: HealthSettings | None
    """The health port; None for none."""
    shared: bool = False
    """True if agents of other jobs, also of later ones, may belong to the run."""


def resolve(options: argparse.Namespace, environ: Mapping[str, str], own_run: str | None = None) -> AgentSettings:
    """Resolve the parsed command line of ``slurm-elastic agent``.

    Options that were not given are None, see `slurm_elastic.cli.commands.agent`. Slurm gives their values:

    - ``--nnodes``: 1 to any number; with ``--run-id`` 1 to the nodes of the step, or of all elements of an array.
    - ``--nproc-per-node``: the GPUs that the job has on this node, else 1.
    - ``--run-dir``: the directory that sbatch was called in, else the current one.

    Outside Slurm a run is one node, like ``torchrun --standalone``. OMP_NUM_THREADS is set as by torchrun.

    Args:
        environ: Slurm's variables and those of etcd. torch reads its own from `os.environ`.
        own_run: Id of the run of this step; None for that of its number.

    Raises:
        UsageError: A value is malformed or contradicts another, or the script does not exist.
    """
    job = SlurmJob.from_environment(environ)
    named = option_values.named_run(options.rdzv_id, job, environ)
    several = named is not None and job is not None and job.array is not None
    _require_consistent(options, job, several)
    run_id: str = named or own_run or (job.run_id if job else f"local-{secrets.token_hex(4)}")
    run_dir = RunDir.for_run(option_values.base_directory(options.run_dir, job), run_id)
    node = job.node if job else _LOCAL_NODE
    nodes = job.nodes if job else (node,)
    # submitit's controller on this machine restarts all agents together, as Slurm does with a requeued allocation.
    again = 0 if job else int(environ.get(option_values.LOCAL_RESTARTS, 0))
    restart_count = job.restart_count if job else again
    shared = named is not None
    host, ports = _endpoint(options, job, run_id, shared)
    leader = option_values.leader_node(options.leader_node, job, node, shared=shared)
    config, entrypoint, args = _launch(options, job, run_id, node, f"{host or leader}:{ports[0]}", several)
    etcd = etcd_wanted(options.rdzv_endpoint, config.rdzv_configs, environ)
    _restrict_nodes(config, options, job, shared)
    if options.logs_specs is None:
        config.logs_specs = _logs_specs(options, run_dir)
    option_values.require_entry_point(options, node)
    return AgentSettings(
        job=job,
        run_id=run_id,
        run_dir=run_dir,
        agent=str(AgentIdentity(node, job.job_id if job else "0", restart_count, os.getpid())),
        node=node,
        position=job.position if job else 0,
        expected_nodes=() if several else nodes,
        restart_count=restart_count,
        shared=shared and not again,
        leader_node=leader,
        ports=ports,
        endpoint_host=host,
        etcd=etcd,
        address=AddressPreference(options.local_addr, options.interface, options.node_pattern),
        launch_config=config,
        entrypoint=entrypoint,
        args=args,
        values=option_values.read_options(lambda name: _text(options, name)),
        watchdog=not options.no_watchdog and is_enabled(environ),
        hang_timeout=hang_timeout(options.hang_timeout, options.first_step_timeout),
        health=None
        if options.no_health
        else health_settings(options.health_bind, options.health_port, options.health_token_file, environ),
    )


def _require_consistent(options: argparse.Namespace, job: SlurmJob | None, several: bool) -> None:
    if options.rdzv_backend not in (None, "slurm"):
        raise UsageError(
            f"--rdzv-backend {options.rdzv_backend}: slurm-elastic agent has one rendezvous, slurm; leave it out, "
            "or use torchrun for the others"
        )
    if options.master_port is not None:
        # If it were ignored, a worker with init_method=tcp://localhost:<port> would wait for a store for ever.
        raise UsageError(
            f"--master-port {options.master_port}: the workers' store has a port of its own in each round, which they "
            "find in MASTER_PORT; leave the option out, with init_method=env://"
        )
    if job and job.step_id is None and len(job.nodes) > 1:
        raise UsageError(
            f"this is one process of a job with {len(job.nodes)} nodes; start one agent on each: "
            "srun --ntasks-per-node=1 slurm-elastic agent ..."
        )
    if options.no_watchdog and options.hang_timeout not in (None, "off"):
        raise UsageError("--hang-timeout needs the watchdog: leave out --no-watchdog")
    if options.standalone and job and (len(job.nodes) > 1 or several):
        raise UsageError("--standalone would train once on every node; leave it out, the nodes find each other")


def _endpoint(
    options: argparse.Namespace, job: SlurmJob | None, run_id: str, shared: bool
) -> tuple[str | None, tuple[int, ...]]:
    host, port = torchrun_options.endpoint(options.rdzv_endpoint)
    if port:
        return host, (port,)
    if job is None or shared:
        # The jobs of one run have different restart counts and reserved ports.
        return host, port_sequence(run_id, 0, ephemeral_low())
    return host, port_sequence(run_id, job.restart_count, ephemeral_low(), job.reserved_ports)


def _launch(
    options: argparse.Namespace, job: SlurmJob | None, run_id: str, node: str, leader: str, several: bool
) -> tuple[LaunchConfig, Callable[..., Any] | str, tuple[str, ...]]:
    here = len(job.nodes) if job else 1
    elements = (job.array.task_count or 1) if several and job and job.array else 1
    # A run that its job has begun alone may be made larger, see slurm_elastic.submission.resize.
    alone = job is not None and options.rdzv_id is None
    least, most = option_values.node_range(options.nnodes, option_values.NO_MAXIMUM if alone else here * elements)
    workers = torchrun_options.local_world_size(options.nproc_per_node, (job.gpus_on_node if job else 0) or 1)
    first = job is None or job.node_rank == 0
    if torchrun_options.limit_threads(workers) and first:
        _log.info("OMP_NUM_THREADS is not set: 1 for each worker, as with torchrun")
    if first:
        for line in torchrun_options.ignored_options(options):
            _log.warning(line)
        if job:
            _warn_of_components_without_agents(job)
        if job and job.array and not several:
            _log.info("element %s is a run of its own; with array.sbatch all elements are one run", job.name)
    config, entrypoint, args = torchrun_options.torchrun_config(
        options, nnodes=f"{least}:{most}", nproc_per_node=str(workers), rdzv_id=run_id, rdzv_endpoint=leader
    )
    config.log_line_prefix_template = config.log_line_prefix_template or f"[{node}/${{rank}}] "
    return config, entrypoint, args


def _warn_of_components_without_agents(job: SlurmJob) -> None:
    # By default srun starts a step on the first component alone (srun(1), --het-group).
    without = [nodes for nodes in job.het if not set(nodes) & set(job.nodes)]
    if without:
        _log.warning(
            "heterogeneous job: no agent on %s; for one run on all components start the agents by "
            "srun --het-group=0-%d",
            ", ".join(compress(nodes) for nodes in without),
            len(job.het) - 1,
        )


def _restrict_nodes(config: LaunchConfig, options: argparse.Namespace, job: SlurmJob | None, shared: bool) -> None:
    """Narrow the bounds of a round to the numbers of nodes that its options allow."""
    here = len(job.nodes) if job else 1
    sizes = {"node_unit": options.node_unit, "valid_nodes": options.valid_nodes, "segment": options.segment}
    config.rdzv_configs.update({name: value for name, value in sizes.items() if value})
    rendezvous = RendezvousOptions.from_config(config.rdzv_configs)
    if options.nnodes is None and not shared:
        rendezvous.node_range(config.min_nodes, here)
    config.min_nodes, config.max_nodes = least, _ = rendezvous.node_range(config.min_nodes, config.max_nodes)
    if least > here and not shared:
        there, fix = (f"the job has {here}", f" or submit with --nodes={least}") if job else ("there is one here", "")
        raise UsageError(f"--nnodes: at least {least} nodes are asked for, and {there}; lower the minimum{fix}")


def _logs_specs(options: argparse.Namespace, run_dir: RunDir) -> RoundLogsSpecs:
    tee = options.tee or ("3" if options.redirects is None else "0")
    logs: RunDir | None = run_dir
    if options.log_dir == os.devnull:
        logs = None
    elif options.log_dir:
        logs = RunDir(Path(options.log_dir).absolute() / run_dir.run_id, run_dir.run_id)
    return RoundLogsSpecs(
        logs,
        redirects=streams("--redirects", options.redirects or "0"),
        tee=streams("--tee", tee),
        local_ranks_filter=local_ranks(options.local_ranks_filter),
    )


def _text(options: argparse.Namespace, name: str) -> str | None:
    if name == "shutdown_timeout":
        # As torch does, from 2.12 on (torch/distributed/launcher/api.py).
        return options.shutdown_timeout or os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    text: str | None = getattr(options, name)
    return text
