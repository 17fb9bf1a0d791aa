"""The parts of an agent that follow from its settings alone. `slurm_elastic.agent.run` wires them."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import WorkerSpec

from slurm_elastic.agent.event_log import utc_now
from slurm_elastic.agent.health.state import AgentState
from slurm_elastic.agent.job.job_end_effects import JobAtEnd
from slurm_elastic.agent.job.preemption import SignalDiagnosis, asks_slurm
from slurm_elastic.agent.job.requeue import read_history
from slurm_elastic.agent.node.failure_domain import failure_domain
from slurm_elastic.agent.notification import Delivery, NotifyFeature
from slurm_elastic.agent.option_values import require_known
from slurm_elastic.agent.progress_log import ProgressLog
from slurm_elastic.agent.settings import AgentSettings
from slurm_elastic.agent.signals import record_signals
from slurm_elastic.failures.history import Loop, find_loops
from slurm_elastic.rendezvous.connect import RendezvousConfig
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.torch_handler import SlurmRendezvousHandler
from slurm_elastic.rundir import JobRecords, RunDirError
from slurm_elastic.slurm import (
    Controller,
    Diagnosis,
    SlurmJob,
    choose_address,
    data_interface,
    gather_facts,
    gloo_interface,
)
from slurm_elastic.snapshot.lineage import choose

if TYPE_CHECKING:
    from slurm_elastic.agent.job.replacement import Replacer, Submission

logger = logging.getLogger("slurm_elastic")


def rendezvous_config(settings: AgentSettings, records: Records, own: str) -> RendezvousConfig:
    """Return the identity of the agent, its run and its options, for the rendezvous."""
    config = settings.launch_config
    options = RendezvousOptions.from_config(config.rdzv_configs)
    may_lead = settings.job is None or settings.node == settings.leader_node
    leader_host = settings.endpoint_host or ("127.0.0.1" if settings.job is None else settings.leader_node)
    address, interface, for_gloo = "127.0.0.1", "", ""
    if settings.job is not None and settings.leader_node not in settings.job.nodes:
        require_known(settings.leader_node, Controller())
    if settings.job is not None:
        facts = gather_facts(settings.address, settings.node, toward=leader_host, controller=Controller())
        address, interface = choose_address(settings.address, facts), data_interface(settings.address, facts)
        for_gloo = interface or gloo_interface(settings.address, facts)
    return RendezvousConfig(
        run_id=settings.run_id,
        run_dir=settings.run_dir,
        records=records,
        restart_count=settings.restart_count,
        incarnation=own,
        agent=settings.agent,
        node=settings.node,
        position=settings.position,
        address=address,
        local_world_size=config.nproc_per_node,
        role=config.role,
        expected_nodes=settings.expected_nodes,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        may_lead=may_lead,
        leader_host=leader_host,
        ports=settings.ports,
        options=options,
        interface=interface,
        gloo_interface=for_gloo,
        cohort=settings.job.cohort if settings.job is not None else ("", 1),
        choose_origin=choose,
        domain=failure_domain(settings.failure_domain, settings.job, record_signals().fd),
    )


def worker_spec(settings: AgentSettings, handler: SlurmRendezvousHandler) -> WorkerSpec:
    """Return what torch has to know of the workers."""
    config = settings.launch_config
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=settings.entrypoint,
        args=settings.args,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def first_state(settings: AgentSettings) -> AgentState:
    """Return the state of an agent that begins."""
    now = time.monotonic()
    return AgentState(
        run=settings.run_id,
        node=settings.node,
        job=settings.job.job_id if settings.job else "0",
        agent=settings.agent,
        since=now,
        changing_since=now,
        max_restarts=settings.launch_config.max_restarts,
    )


def progress_log(settings: AgentSettings, domain: str = "") -> ProgressLog:
    """Return the log of the progress of the workers here."""
    config = settings.launch_config
    whose = (settings.run_dir, settings.node, settings.agent)
    return ProgressLog(*whose, config.nproc_per_node, config.max_restarts, domain)


def notify_feature(
    settings: AgentSettings, rendezvous: RendezvousConfig, coordination: Coordination
) -> NotifyFeature | None:
    """Return the feature of `--notify`; None without it."""
    if settings.notify is None:
        return None
    delivery = Delivery(settings.notify, settings.run_dir, settings.node)

    def loops() -> tuple[Loop, ...]:
        return find_loops(read_history(settings.run_dir), time.time())

    return NotifyFeature(settings.notify, delivery, rendezvous.incarnation, lambda: coordination.leads, loops)


def replacer(
    settings: AgentSettings,
    rendezvous: RendezvousConfig,
    coordination: Coordination,
    submission: Callable[[], Submission],
) -> Replacer | None:
    """Return what has lost nodes replaced, started; None where nothing does."""
    if settings.replace is None or settings.job is None:
        return None
    from slurm_elastic.agent.job.replacement import Replacer, Run

    run = Run(
        settings.run_dir,
        len(settings.expected_nodes),
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        settings.requeue_policy.max_excluded,
    )
    records = rendezvous.records
    replacer_ = Replacer(settings.replace, run, coordination.led, records.newest_epoch, submission())
    replacer_.start()
    return replacer_


def job_at_end(
    settings: AgentSettings, job: SlurmJob, rendezvous: RendezvousConfig, coordination: Coordination
) -> JobAtEnd:
    """Return what the agent does for its job at its end."""
    return JobAtEnd(
        job,
        settings.agent,
        settings.run_dir,
        rendezvous.records,
        rendezvous.incarnation,
        settings.requeue_policy,
        coordination.known_members(),
        record_signals().fd,
    )


def signal_diagnosis(
    settings: AgentSettings, checkpoint: Callable[[], int | None], newest_save: Callable[[], float | None]
) -> SignalDiagnosis:
    """Return what finds out why Slurm signals this agent.

    Args:
        settings: The settings.
        checkpoint: Returns the step of the newest checkpoint that a worker here has reported.
        newest_save: Returns the seconds that it took.
    """
    job, meaning = settings.job, settings.requeue_policy.meaning
    if job is None:
        return SignalDiagnosis(record_signals(), None, meaning)
    records = JobRecords(settings.run_dir, job.job_id)

    def write(signals: Sequence[signal.Signals], finding: Diagnosis) -> None:
        record = {
            "signals": [number.name for number in signals],
            "cause": finding.cause.name,
            "text": str(finding),
            "seconds": finding.seconds,
            "progress": checkpoint(),
            "time": utc_now(),
        }
        try:
            records.publish_notice(job.restart_count, record)
        except RunDirError as error:
            logger.warning("the notice is not written down: %s", error)

    def asks() -> bool:
        return asks_slurm(settings.run_dir, job, settings.agent)

    def grace(seconds: float | None) -> float | None:
        try:
            if seconds is not None:
                records.publish_grace(job.restart_count, seconds)
            return records.grace(job.restart_count) if seconds is None else seconds
        except RunDirError as error:
            logger.warning("the grace of the job is not on record: %s", error)
            return seconds

    def warned() -> bool:
        try:
            signals = (records.notice(job.restart_count) or {}).get("signals")
        except RunDirError:
            return False
        return isinstance(signals, list) and not {"SIGUSR1", "SIGUSR2"}.isdisjoint(map(str, signals))

    return SignalDiagnosis(
        *(record_signals(), job, meaning, Controller(), write, asks),
        grace=grace,
        newest_save=newest_save,
        warned_on_record=warned,
    )
