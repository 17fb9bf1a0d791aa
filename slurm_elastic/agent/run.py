"""The wiring of one agent, from its settings to its exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.agent import features
from slurm_elastic.agent.agent import Agent
from slurm_elastic.agent.console_log import NOTICE, notice
from slurm_elastic.agent.event_log import EventLog, FactLines
from slurm_elastic.agent.forkserver.client import ForkServer
from slurm_elastic.agent.forkserver.protocol import StartInterruptedError
from slurm_elastic.agent.health.pages import NodePages
from slurm_elastic.agent.health.server import health_port, withdraw_lost
from slurm_elastic.agent.health.state import AgentState, Readings
from slurm_elastic.agent.job.job_end import represents_job
from slurm_elastic.agent.job.job_end_effects import JobAtEnd, is_known_done
from slurm_elastic.agent.lifecycle.states import Done
from slurm_elastic.agent.node.claims import node_directory
from slurm_elastic.agent.node.failure_domain import failure_domain
from slurm_elastic.agent.notification import NotifyFeature
from slurm_elastic.agent.option_values import GROWS_VARIABLE
from slurm_elastic.agent.progress_log import ProgressLog
from slurm_elastic.agent.root_cause import end_on_record, root_cause
from slurm_elastic.agent.settings import AgentSettings
from slurm_elastic.agent.signals import record_signals
from slurm_elastic.agent.step_timing import StepTimingFeature, leader_reports
from slurm_elastic.agent.watchdog.hangs import Hang
from slurm_elastic.agent.watchdog.timers import make_pipe
from slurm_elastic.agent.watchdog.watchdog import Watchdog
from slurm_elastic.agent.workers.processes import require_numa_binding
from slurm_elastic.errors import ExitCode, SlurmElasticError, UsageError
from slurm_elastic.rendezvous.connect import RendezvousConfig, connect
from slurm_elastic.rendezvous.membership.events import Decision, Drop, Publish
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import Records, RecordsInterruptedError, open_records
from slurm_elastic.rendezvous.run_events import Entry, describe
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rendezvous.worker_store import prepare_stores
from slurm_elastic.rundir import RunContents, RunDir, incarnation_of, join_named, join_own, remember_directory
from slurm_elastic.slow_ranks import LOOK
from slurm_elastic.slurm import Controller, choose_address, data_interface, gather_facts, gloo_interface

if TYPE_CHECKING:
    from slurm_elastic.agent.job.replacement import Replacer, Submission

logger = logging.getLogger("slurm_elastic")

_IMPORT_TIMEOUT = 15.0
"""Seconds that a node imports before it joins a run that trains already, at most."""


def join(settings: AgentSettings, command: Sequence[str]) -> RunDir:
    """Return the directory, opened, of the run that this agent belongs to.

    It is another one than in the settings where a step has other runs before it.

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
    fork_server: ForkServer,
    snapshots: features.Snapshots,
    summarize: Callable[[RunDir], str],
    submission: Callable[[], Submission],
) -> ExitCode:
    """Take part in the run until it ends or this agent has to leave.

    Args:
        summarize: Returns the line with which the leader of a run that has succeeded ends.
        submission: Makes what submits jobs for nodes that were lost.

    Raises:
        UsageError: The user has to change something; no worker was started.
        RecordsError: The records of the run cannot be read; no worker was started.
    """
    prepare_stores()
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
            if (code := _end_before_the_start(settings, records)) is not None:
                return code
            with (
                node_directory() as directory,
                health_port(settings.health, settings.run_dir, _first_state(settings)) as health,
            ):
                rendezvous = _rendezvous_config(settings, records, own, snapshots)
                run = _Run(settings, rendezvous, fork_server, health, directory, snapshots)
                return run.take_part(summarize, submission)
    except RecordsInterruptedError:
        notice(f"{settings.node} got {first_signal()} while it waited for etcd")
        return ExitCode.LEFT


def _end_before_the_start(settings: AgentSettings, records: Records) -> ExitCode | None:
    """Return the exit code of an agent of a run that is over; None if there is something to train."""
    if os.environ.get(GROWS_VARIABLE) == settings.run_id and (code := end_on_record(records)) is not None:
        notice(f"run {settings.run_id} is over: it needs no more nodes")
        return code
    if not records.is_done():
        return None
    job = settings.job
    took_part = job is not None and job.job_id in RunContents(settings.run_dir).jobs()
    # An element of an array belongs to its run, also where Slurm starts it late.
    if settings.shared and settings.expected_nodes and not took_part:
        raise UsageError(
            f"run {settings.run_id} is finished, and this agent has no part in it: nothing is trained; give "
            "another --run-id for a new run"
        )
    notice(f"run {settings.run_id} is finished already: nothing to do")
    if not settings.shared:
        # The next agent of this step on this node is another run.
        _progress_log(settings).ended(ExitCode.FINISHED)
    return ExitCode.FINISHED


class _Run:
    def __init__(
        self,
        settings: AgentSettings,
        rendezvous: RendezvousConfig,
        fork_server: ForkServer,
        health: NodePages,
        directory: Path,
        snapshots: features.Snapshots,
    ) -> None:
        config = settings.launch_config
        self._settings, self._rendezvous, self._fork_server, self._health = settings, rendezvous, fork_server, health
        self._directory, self._snapshots = directory, snapshots
        self._facts = FactLines(settings.run_id, config.max_restarts) if settings.values.console == "brief" else None
        self._events = EventLog(settings.run_dir, settings.node, self._facts)
        self._notify: NotifyFeature | None = None
        self._coordination = connect(rendezvous, self._record, can_hold=True)
        health.sources = (self._status,)
        if settings.values.notify:
            self._notify = NotifyFeature(settings.values, rendezvous, lambda: self._coordination.leads)
        self._progress = _progress_log(settings, rendezvous.domain)

    def take_part(self, summarize: Callable[[RunDir], str], submission: Callable[[], Submission]) -> ExitCode:
        """Train until the run ends or this agent has to leave, and return the exit code; see `launch`."""
        settings, coordination = self._settings, self._coordination
        # The leader knows of this agent from now on, and collects agents that join at about the same time.
        self._import_before_join()
        watchdog = self._watchdog()
        replacing = _replacer(settings, self._rendezvous, coordination, submission)
        # Learned imports come after the watchdog, which marks the workers that hung.
        parts = [
            features.WatchdogFeature(watchdog) if watchdog is not None else None,
            features.HealthFeature(self._health.reporter),
            self._progress,
            features.AttributionFeature(compare=settings.values.stop_on_same_failure == "on"),
            self._notify,
            features.LearnedImportsFeature(self._fork_server),
            self._snapshots.feature(settings.values, self._rendezvous, self._fork_server, self._directory),
            StepTimingFeature(partial(leader_reports, settings.run_dir), self._events.add, LOOK),
            replacing,
        ]
        there = [part for part in parts if part is not None]
        agent = Agent(settings, self._rendezvous, coordination, self._fork_server, there, self._directory)
        self._health.sources = (self._status, *(part.status for part in there))
        coordination.report = self._health.live_report
        if self._facts is not None:
            self._facts.reached = agent.reached
        try:
            if watchdog is not None:
                watchdog.start(agent.torch.record_watchdog)
            outcome = agent.supervise()
        finally:
            agent.diagnosis.close()
            coordination.stop()
        if outcome.exit_code is ExitCode.LEFT and is_known_done(self._rendezvous.records):
            # The leader recorded the end, and went before it could tell this agent.
            outcome = Done(ExitCode.FINISHED)
        while outcome.exit_code is ExitCode.LEFT and (finding := agent.diagnosis.next_finding()) is not None:
            # The workers had ended before Slurm said why it wants the node.
            logger.info("%s leaves: %s", settings.node, finding)
        self._record_end(outcome)
        if self._notify is not None:
            self._notify.close()
        if replacing is not None:
            replacing.close(outcome.exit_code, leads=coordination.leads)
        self._events.close()
        finished = outcome.exit_code is ExitCode.FINISHED
        missing = next((part.missing for part in there if part.missing), "") if finished else ""
        exit_code = ExitCode.FAILED if missing else outcome.exit_code
        self._progress.ended(exit_code)
        if finished and coordination.leads:
            with contextlib.suppress(SlurmElasticError):
                notice(f"finished: {summarize(settings.run_dir)}")
        if settings.job is not None:
            told = coordination.known_members()
            JobAtEnd(settings.job, self._rendezvous, settings.values, told, record_signals().fd).carry_out(
                outcome,
                diagnoses=agent.diagnosis.asks,
                leads=coordination.leads,
                shares_run=settings.shared,
                represents_job=represents_job(settings.job, settings.agent, agent.assignment),
            )
        if missing:
            # The last line: who reads no more has to know it.
            logger.error("the run is finished, and its last checkpoint is not on disk: %s", missing)
        return exit_code

    def _import_before_join(self) -> None:
        """Import before this node joins a run that trains: the workers of the other nodes wait for the new round."""
        if not self._settings.shared or self._settings.run_dir.newest("rounds") is None:
            return
        with contextlib.suppress(StartInterruptedError):
            self._fork_server.wait_ready(_IMPORT_TIMEOUT, lambda: _is_leaving() or self._coordination.has_event)

    def _watchdog(self) -> Watchdog | None:
        settings = self._settings

        def report(hang: Hang) -> None:
            self._health.reporter.hung(killed=hang.killed is not None)
            # One that waits in a collective waits for another rank, whose agent tells of it.
            self._events.add(
                features.hang_event(settings.node, hang), logging.INFO if hang.in_collective else logging.WARNING
            )

        if not settings.watchdog:
            return None
        pipe = make_pipe(os.environ, self._directory)
        return Watchdog(pipe, report, settings.hang_timeout, settings.values.stacks_after)

    def _record(self, decision: Decision) -> None:
        if (entry := describe(decision)) is not None:
            self._events.add(entry, origin=self._origin(decision))
            if self._notify is not None:
                self._notify.happened(entry)
        if isinstance(decision, Drop):
            withdraw_lost(self._settings.run_dir, decision.agent)

    def _origin(self, decision: Decision) -> int | None:
        """Return the step of the snapshot that the workers of a new round start from."""
        if not isinstance(decision, Publish) or not decision.table.origin:
            return None
        return self._snapshots.step_of(decision.table.origin)

    def _record_end(self, outcome: Done) -> None:
        rendezvous = self._rendezvous
        # Of an agent that leaves with notice the leader tells.
        level = NOTICE if outcome.gave_up else logging.INFO
        level = logging.ERROR if outcome.exit_code in (ExitCode.FAILED, ExitCode.FENCED) else level
        if outcome.failure is None:
            if outcome.detail:
                fields: dict[str, object] = {"exit_code": int(outcome.exit_code)}
                if outcome.no_leader:
                    fields["no_leader_for"] = rendezvous.options.join_timeout
                self._events.add(Entry("agent_ended", f"{rendezvous.node} ends: {outcome.detail}", fields), level)
        elif self._coordination.leads:
            # The leader ends last, so no agent logs after this; batch scripts of other jobs print it from the records.
            why = f"{outcome.detail}: " if outcome.detail else ""
            logger.error("the run failed: %s%s", why, root_cause(outcome.failure))

    def _status(self, readings: Readings) -> Readings:
        coordination = self._coordination
        leads = coordination.leads
        leader = self._settings.node if leads else coordination.leader_address()
        return replace(readings, leader=leader, leads=leads, rejected=coordination.rejected())


def _is_leaving() -> bool:
    return record_signals().first() is not None


# The parts of an agent that follow from its settings alone.


def _rendezvous_config(
    settings: AgentSettings, records: Records, own: str, snapshots: features.Snapshots
) -> RendezvousConfig:
    config = settings.launch_config
    options = RendezvousOptions.from_config(config.rdzv_configs)
    may_lead = settings.job is None or settings.node == settings.leader_node
    leader_host = settings.endpoint_host or ("127.0.0.1" if settings.job is None else settings.leader_node)
    address, interface, for_gloo = "127.0.0.1", "", ""
    if settings.job is not None:
        leader, controller = settings.leader_node, Controller()
        # No agent would ever start there.
        if leader not in settings.job.nodes and controller.knows_node(leader) is False:
            raise UsageError(f"--leader-node {leader}: Slurm knows no such node; see sinfo --Node")
        facts = gather_facts(settings.address, settings.node, toward=leader_host, controller=controller)
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
        choose_origin=snapshots.choose_origin,
        domain=failure_domain(settings.values.failure_domain, settings.job, record_signals().fd),
    )


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


def _progress_log(settings: AgentSettings, domain: str = "") -> ProgressLog:
    config = settings.launch_config
    whose = (settings.run_dir, settings.node, settings.agent)
    return ProgressLog(*whose, config.nproc_per_node, config.max_restarts, domain)


def _replacer(
    settings: AgentSettings,
    rendezvous: RendezvousConfig,
    coordination: Coordination,
    submission: Callable[[], Submission],
) -> Replacer | None:
    if settings.values.replace_lost is None or settings.job is None:
        return None
    from slurm_elastic.agent.job.replacement import Replacer

    replacer_ = Replacer(settings.values, rendezvous, coordination.led, submission())
    replacer_.start()
    return replacer_
