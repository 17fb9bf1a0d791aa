"""The wiring of one agent, from its settings to its exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerSpec

from slurm_elastic.agent.agent import Agent
from slurm_elastic.agent.attribution import AttributionFeature
from slurm_elastic.agent.console_log import NOTICE, notice
from slurm_elastic.agent.event_log import EventLog, utc_now
from slurm_elastic.agent.fact_lines import FactLines
from slurm_elastic.agent.failure_domain import failure_domain
from slurm_elastic.agent.features import (
    Feature,
    HealthFeature,
    LearnedImportsFeature,
    SnapshotFeature,
    WatchdogFeature,
    hang_event,
)
from slurm_elastic.agent.forkserver import ForkServer, StartInterruptedError
from slurm_elastic.agent.health import AgentState, Health, health_port, withdraw_lost
from slurm_elastic.agent.job_end import AgentEnd, notice_record, represents_job
from slurm_elastic.agent.job_end_effects import JobAtEnd, is_known_done
from slurm_elastic.agent.lifecycle import AgentOutcome
from slurm_elastic.agent.live_report import live_report, process_letters
from slurm_elastic.agent.notification import Delivery, NotifyFeature
from slurm_elastic.agent.option_values import GROWS_VARIABLE, require_known
from slurm_elastic.agent.preemption import SignalDiagnosis, asks_slurm
from slurm_elastic.agent.process_end import at_process_end
from slurm_elastic.agent.progress_log import ProgressLog
from slurm_elastic.agent.root_cause import end_on_record, root_cause
from slurm_elastic.agent.run_history import read_history
from slurm_elastic.agent.settings import AgentSettings
from slurm_elastic.agent.signals import record_signals
from slurm_elastic.agent.step_timing import StepTimingFeature, leader_reports
from slurm_elastic.agent.watchdog import Hang, Watchdog, make_pipe
from slurm_elastic.agent.worker_processes import require_numa_binding, worker_starter
from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError
from slurm_elastic.failures import Loop, find_loops
from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.membership import Decision, Drop, Publish
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import Records, RecordsInterruptedError
from slurm_elastic.rendezvous.records.open import open_records
from slurm_elastic.rendezvous.run_events import Entry, describe
from slurm_elastic.rendezvous.store_process import prepare_stores
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.torch_handler import SlurmRendezvousHandler
from slurm_elastic.rundir import (
    JobRecords,
    RunContents,
    RunDir,
    RunDirError,
    incarnation_of,
    join_named,
    join_own,
    remember_directory,
)
from slurm_elastic.slow_ranks import LOOK
from slurm_elastic.slurm import (
    Controller,
    Diagnosis,
    SlurmJob,
    choose_address,
    data_interface,
    gather_facts,
    gloo_interface,
)
from slurm_elastic.snapshot.lineage import choose, read_origin

if TYPE_CHECKING:
    from slurm_elastic.agent.replacement import Replacer, Submission

logger = logging.getLogger("slurm_elastic")

_IMPORT_TIMEOUT = 15.0
"""Seconds that a node imports before it joins a run that trains already, at most."""


def join(settings: AgentSettings, command: Sequence[str]) -> RunDir:
    """Return the directory, opened, of the run that this agent belongs to.

    Args:
        settings: The settings. The run is another one than there where a step has other runs before it.
        command: Script and arguments.

    Raises:
        UsageError: The run has another script or other arguments.
    """
    run_dir = settings.run_dir
    if settings.job is not None and settings.job.node_rank == 0:
        remember_directory(run_dir.path.parent.parent)
    if settings.job is not None and not settings.shared:
        return join_own(run_dir.path.parent.parent, settings.job, command)
    join_named(run_dir.open(), command, again=settings.restart_count > 0)
    return run_dir


def launch(
    settings: AgentSettings,
    fork_server: ForkServer | None,
    summarize: Callable[[RunDir], str],
    submission: Callable[[], Submission],
) -> ExitCode:
    """Take part in the run until it ends or this agent has to leave.

    Args:
        settings: The settings; the run directory is open.
        fork_server: The process that starts the workers; None where torch itself has to start them.
        summarize: Returns the line with which the leader of a run that has succeeded ends.
        submission: Makes what submits jobs for nodes that were lost.

    Raises:
        UsageError: The user has to change something; no worker was started.
        RecordsError: The records of the run cannot be read; no worker was started.
    """
    prepare_stores()
    if fork_server is not None:
        require_numa_binding(settings.launch_config.nproc_per_node, settings.launch_config.numa_options)
    # A requeued element of an array joins the run that goes on; a requeued allocation begins with records of its own,
    # unless agents of other jobs have joined it before.
    own = incarnation_of(settings.run_dir, None if settings.shared else settings.restart_count)
    limit = RendezvousOptions.from_config(settings.launch_config.rdzv_configs).etcd_limit
    first_signal = record_signals().first
    try:
        records = open_records(
            settings.run_dir, own, settings.etcd, limit=limit, interrupted=lambda: first_signal() is not None
        )
        with contextlib.closing(records):
            return _join_run(settings, fork_server, records, own, summarize, submission)
    except RecordsInterruptedError:
        notice(f"{settings.node} got {first_signal()} while it waited for etcd")
        return ExitCode.LEFT


def _join_run(
    settings: AgentSettings,
    fork_server: ForkServer | None,
    records: Records,
    own: str,
    summarize: Callable[[RunDir], str],
    submission: Callable[[], Submission],
) -> ExitCode:
    if os.environ.get(GROWS_VARIABLE) == settings.run_id and (code := end_on_record(records)) is not None:
        notice(f"run {settings.run_id} is over: it needs no more nodes")
        return code
    if records.is_done():
        job = settings.job
        took_part = job is not None and RunContents(settings.run_dir).has_job(job.job_id)
        # An element of an array belongs to its run, also where Slurm starts it late.
        if settings.shared and settings.expected_nodes and not took_part:
            raise UsageError(
                f"run {settings.run_id} is finished, and this agent has no part in it: nothing is trained; give "
                "another --run-id for a new run"
            )
        notice(f"run {settings.run_id} is finished already: nothing to do")
        if not settings.shared:
            # The next agent of this step on this node is another run.
            _progress(settings).ended(ExitCode.FINISHED)
        return ExitCode.FINISHED
    with health_port(settings.health, settings.run_dir, _first_state(settings)) as health:
        return _supervise(settings, _rendezvous(settings, records, own), fork_server, health, summarize, submission)


def _supervise(
    settings: AgentSettings,
    rendezvous: RendezvousConfig,
    fork_server: ForkServer | None,
    health: Health,
    summarize: Callable[[RunDir], str],
    submission: Callable[[], Submission],
) -> ExitCode:
    config = settings.launch_config
    facts = FactLines(settings.run_id, config.max_restarts) if settings.brief else None
    events = EventLog(settings.run_dir, settings.node, config.event_log_handler, facts)

    notify: NotifyFeature | None = None

    def journal(decision: Decision) -> None:
        entry = describe(decision)
        if entry is not None:
            events.add(entry, origin=_origin(decision))
            if notify is not None:
                notify.happened(entry)
        if isinstance(decision, Drop):
            withdraw_lost(settings.run_dir, decision.agent)

    coordination = connect(rendezvous, journal, can_hold=True)
    health.pages.leadership = lambda: (
        settings.node if coordination.leads else coordination.leader_address(),
        coordination.leads,
    )
    health.pages.rejected = coordination.rejected
    notify = _notify(settings, rendezvous, coordination)
    progress = _progress(settings, rendezvous.domain)
    # The leader knows of this agent from now on, and collects agents that join at about the same time.
    _import_before_join(settings, fork_server, coordination)
    features: list[Feature] = [HealthFeature(health.reporter), progress]
    features.append(AttributionFeature(compare=settings.stop_on_same_failure))
    if notify is not None:
        features.append(notify)
    watchdog = _watchdog(settings, events, health)
    if watchdog is not None:
        features.insert(0, WatchdogFeature(watchdog))
    if fork_server is not None:
        # After the watchdog's feature, which marks the workers that hung.
        features.append(LearnedImportsFeature(fork_server))

    def is_leaving() -> bool:
        return record_signals().first() is not None

    snapshots = None
    try:
        snapshots = SnapshotFeature(
            rendezvous, is_leaving, settings.snapshot_replicas, fork_server, settings.snapshot_slots
        )
        features.append(snapshots)
        health.pages.snapshots = snapshots.held
    except OSError as error:
        logger.warning("%s holds no snapshots: %s", settings.node, error)
    timing = StepTimingFeature(leader_reports(settings.run_dir), events.add, LOOK)
    features.append(timing)
    health.pages.paces, health.pages.slow = timing.paces, timing.slow
    replacer = _replacer(settings, rendezvous, coordination, submission)
    if replacer is not None:
        features.append(replacer)
    diagnosis = _signal_diagnosis(settings, lambda: agent.last_checkpoint(), lambda: agent.newest_save())
    assert config.logs_specs is not None
    agent = Agent(
        _worker_spec(settings, SlurmRendezvousHandler(rendezvous, coordination)),
        config.logs_specs,
        rendezvous,
        coordination,
        record_signals(),
        diagnosis,
        worker_starter(fork_server, config.logs_specs, config.log_line_prefix_template, brief=settings.brief),
        features,
        shutdown_timeout=settings.shutdown_timeout,
        worker_signal=settings.worker_signal,
    )
    health.pages.progress = agent.progress
    if facts is not None:
        facts.reached = agent.reached

    def report() -> str:
        state = health.reporter.state
        pids = [worker.pid for worker in state.round_info.workers] if state.round_info is not None else []
        letters, now = process_letters(pids), time.monotonic()
        return live_report(state, agent.progress(), letters, now, timing.paces(), health.pages.snapshots())

    coordination.report = report
    try:
        if watchdog is not None:
            watchdog.start(agent.torch.record_watchdog)
        outcome = agent.supervise()
    finally:
        if replacer is not None:
            replacer.halt()
        health.reporter.over()
        diagnosis.close()
        coordination.stop()
    if outcome.exit_code is ExitCode.LEFT and is_known_done(rendezvous.records):
        # The leader recorded the end, and went before it could tell this agent.
        outcome = AgentOutcome(ExitCode.FINISHED)
    while outcome.exit_code is ExitCode.LEFT and (finding := diagnosis.next_finding()) is not None:
        # The workers had ended before Slurm said why it wants the node.
        logger.info("%s leaves: %s", settings.node, finding)
    _record_end(outcome, rendezvous, coordination.leads, events)
    if notify is not None:
        notify.close()
    if replacer is not None:
        replacer.close(outcome.exit_code, leads=coordination.leads)
    events.close()
    missing = snapshots.missing if snapshots is not None and outcome.exit_code is ExitCode.FINISHED else ""
    exit_code = ExitCode.FAILED if missing else outcome.exit_code
    progress.ended(exit_code)
    at_process_end(progress.close)
    if outcome.exit_code is ExitCode.FINISHED and coordination.leads:
        with contextlib.suppress(SlurmElasticError):
            notice(f"finished: {summarize(settings.run_dir)}")
    if settings.job is not None:
        _job_at_end(settings, settings.job, rendezvous, coordination).carry_out(
            AgentEnd(
                outcome.exit_code,
                gave_up=outcome.gave_up,
                diagnoses=diagnosis.asks,
                leads=coordination.leads,
                shares_run=settings.shared,
                represents_job=represents_job(settings.job, settings.agent, agent.last_assignment),
            )
        )
    if missing:
        # The last line: who reads no more has to know it.
        logger.error("the run is finished, and its last checkpoint is not on disk: %s", missing)
    return exit_code


def _origin(decision: Decision) -> int | None:
    """Return the step of the snapshot that the workers of a new round start from."""
    copy = read_origin(decision.table.origin).copy if isinstance(decision, Publish) and decision.table.origin else None
    return None if copy is None else copy.id.step


def _progress(settings: AgentSettings, domain: str = "") -> ProgressLog:
    config = settings.launch_config
    whose = (settings.run_dir, settings.node, settings.agent)
    return ProgressLog(*whose, config.nproc_per_node, config.max_restarts, domain)


def _worker_spec(settings: AgentSettings, handler: SlurmRendezvousHandler) -> WorkerSpec:
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


def _watchdog(settings: AgentSettings, events: EventLog, health: Health) -> Watchdog | None:
    def report(hang: Hang) -> None:
        health.reporter.hung(killed=hang.killed is not None)
        events.add(hang_event(settings.node, hang), logging.WARNING)

    pipe = make_pipe(os.environ) if settings.watchdog else None
    if pipe is not None:
        health.pages.watchdog = Watchdog(pipe, report, settings.hang_timeout, stacks_after=settings.stacks_after)
    return health.pages.watchdog


def _notify(settings: AgentSettings, rendezvous: RendezvousConfig, coordination: Coordination) -> NotifyFeature | None:
    if settings.notify is None:
        return None
    delivery = Delivery(settings.notify, settings.run_dir, settings.node)

    def loops() -> tuple[Loop, ...]:
        return find_loops(read_history(settings.run_dir), time.time())

    return NotifyFeature(settings.notify, delivery, rendezvous.incarnation, lambda: coordination.leads, loops)


def _replacer(
    settings: AgentSettings,
    rendezvous: RendezvousConfig,
    coordination: Coordination,
    submission: Callable[[], Submission],
) -> Replacer | None:
    if settings.replace is None or settings.job is None:
        return None
    from slurm_elastic.agent.replacement import Replacer, Run

    run = Run(
        settings.run_dir,
        len(settings.expected_nodes),
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        settings.requeue_policy.max_excluded,
    )
    records = rendezvous.records
    replacer = Replacer(settings.replace, run, coordination.led, records.newest_epoch, submission())
    replacer.start()
    return replacer


def _job_at_end(
    settings: AgentSettings, job: SlurmJob, rendezvous: RendezvousConfig, coordination: Coordination
) -> JobAtEnd:
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


def _import_before_join(settings: AgentSettings, fork_server: ForkServer | None, coordination: Coordination) -> None:
    """Import before this node joins a run that trains: the workers of the other nodes wait for the new round."""
    if fork_server is not None and settings.shared and settings.run_dir.last_round() is not None:
        with contextlib.suppress(StartInterruptedError):
            fork_server.wait_ready(
                _IMPORT_TIMEOUT, lambda: record_signals().first() is not None or coordination.has_event
            )


def _signal_diagnosis(
    settings: AgentSettings, checkpoint: Callable[[], int | None], newest_save: Callable[[], float | None]
) -> SignalDiagnosis:
    job, meaning = settings.job, settings.requeue_policy.meaning
    if job is None:
        return SignalDiagnosis(record_signals(), None, meaning)
    records = JobRecords(settings.run_dir, job.job_id)

    def write(signals: Sequence[signal.Signals], finding: Diagnosis) -> None:
        try:
            record = {**notice_record(signals, finding, checkpoint()), "time": utc_now()}
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


def _record_end(outcome: AgentOutcome, rendezvous: RendezvousConfig, leads: bool, events: EventLog) -> None:
    # Of an agent that leaves with notice the leader tells.
    level = NOTICE if outcome.gave_up else logging.INFO
    level = logging.ERROR if outcome.exit_code in (ExitCode.FAILED, ExitCode.FENCED) else level
    if outcome.failure is None:
        if outcome.detail:
            fields: dict[str, object] = {"exit_code": int(outcome.exit_code)}
            if outcome.no_leader:
                fields["no_leader_for"] = rendezvous.options.join_timeout
            events.add(Entry("agent_ended", f"{rendezvous.node} ends: {outcome.detail}", fields), level)
    elif leads:
        # The leader ends last, so no agent logs after this; batch scripts of other jobs print it from the records.
        why = f"{outcome.detail}: " if outcome.detail else ""
        try:
            rendezvous.records.publish_failure(msgspec.to_builtins(outcome.failure))
        finally:
            logger.error("the run failed: %s%s", why, root_cause(outcome.failure))


def _first_state(settings: AgentSettings) -> AgentState:
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


def _rendezvous(settings: AgentSettings, records: Records, own: str) -> RendezvousConfig:
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
