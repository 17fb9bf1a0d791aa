"""The configuration of one agent of a run, and how it gets in touch with the others."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_elastic.rendezvous.election.campaign import Campaign, CampaignConfig, CampaignRecords, locate
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.election.runner import FollowerConfig
from slurm_elastic.rendezvous.leader.absent_agents import agents_gone
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords, last_failure
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.leader.releases import own_releases
from slurm_elastic.rendezvous.membership import AgentInfo, Decision, Reason, Settings, adapted_limit
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import Records, RecordsError
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rundir import RunDir, incarnation
from slurm_elastic.slurm import Controller, NodeState, ports_exhausted

__all__ = ["RendezvousConfig", "connect"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RendezvousConfig:
    """One agent of one run, before it has talked to anybody.

    Attributes:
        run_id: of the run.
        run_dir: opened.
        records: of this incarnation.
        restart_count: how often Slurm has requeued the job; keeps incarnations of an allocation apart.
        agent, node, position: see :class:`~slurm_elastic.rendezvous.membership.AgentInfo`.
        address: at which other nodes reach this agent.
        local_world_size, role: of its workers.
        expected_nodes: see :class:`~slurm_elastic.rendezvous.membership.Settings`.
        min_nodes, max_nodes, max_restarts: bounds of the run.
        may_lead: whether this agent leads the run if nobody has led this incarnation yet.
        leader_host: where the leader is expected, until the records tell.
        ports: of the leader, in the order to try.
        options: times.
        shared: whether jobs that start at different times belong to the run, such as elements of an array: then one
            that was requeued joins the living run.
        has_workers: whether this agent wants places in rounds; else all it does is lead.
        interface: the network interface of the data network; empty if the user has named none.
        choose_origin: see :class:`~slurm_elastic.rendezvous.membership.Settings`; used while this agent leads.
        cohort: name and size; see :class:`~slurm_elastic.rendezvous.membership.AgentInfo`.
    """

    run_id: str
    run_dir: RunDir
    records: Records
    restart_count: int
    agent: str
    node: str
    position: int
    address: str
    local_world_size: int
    role: str
    expected_nodes: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    max_restarts: int
    may_lead: bool
    leader_host: str
    ports: tuple[int, ...]
    options: RendezvousOptions
    shared: bool = False
    has_workers: bool = True
    cohort: tuple[str, int] = ("", 1)
    interface: str = ""
    choose_origin: Callable[[int | None, str, Sequence[str], bool], str] | None = None

    @property
    def incarnation(self) -> str:
        """Name of this incarnation of the run; agents of another one are strangers."""
        return incarnation(self.run_id, 0 if self.shared else self.restart_count)

    def agent_info(self, store_port: int, addresses: tuple[str, ...] = (), inventory: str = "") -> AgentInfo:
        """Return what this agent says of itself when it joins.

        Args:
            store_port, addresses: see :class:`~slurm_elastic.rendezvous.worker_store.ReservedPort`.
            inventory: see :class:`~slurm_elastic.rendezvous.membership.AgentInfo`.
        """
        return AgentInfo(
            agent=self.agent,
            node=self.node,
            position=self.position,
            local_world_size=self.local_world_size,
            role=self.role,
            address=self.address,
            store_port=store_port,
            cohort=self.cohort[0],
            cohort_size=self.cohort[1],
            releases=own_releases(),
            addresses=addresses,
            inventory=inventory,
        )


def connect(config: RendezvousConfig, journal: Callable[[Decision], None], *, can_hold: bool = False) -> Coordination:
    """Get in touch with the run's leader, or lead.

    The first of the agents that may lead takes the first epoch of the incarnation and leads; its place is published
    in the records. In an allocation it is also where everybody expects it, whatever the records show so far.

    Args:
        config: of this agent.
        journal: told every decision of the leader, on the leading agent.
        can_hold: see :class:`~slurm_elastic.rendezvous.election.machine.ElectionConfig`.

    Raises:
        UsageError: no port is free for the leader, or the run's secret cannot be used.
        RecordsError: the records of the run cannot be used.
    """
    secret = config.run_dir.secret()
    founder = config.may_lead and config.records.newest_epoch() is None
    listener = _listen(config, founder=founder)
    coordination = Coordination(
        FollowerConfig(
            run=config.incarnation,
            secret=secret,
            agent=config.agent,
            locate=lambda: _locate(config),
            addresses=(config.address,),
            connect_timeout=config.options.join_timeout,
            heartbeat_limit=adapted_limit(
                config.options.heartbeat_limit, max(len(config.expected_nodes), config.min_nodes)
            ),
            leader_limit=config.options.leader_limit,
            can_hold=can_hold,
            coming=config.has_workers,
            campaign=CampaignConfig(
                scope=config.incarnation,
                settings=_settings(config),
                expected_nodes=config.expected_nodes,
                requeued=bool(config.restart_count),
                has_workers=config.has_workers,
                node=config.node,
                directory=str(config.run_dir.path),
            ),
            read_campaign=lambda: _read_campaign(config),
        ),
        listener,
        lambda campaign: _leader(config, secret, listener, campaign, journal),
        _found(config, secret, listener, journal) if founder else None,
        config.records.stop_waiting,
    )
    config.records.on_loss(coordination.records_lost)
    coordination.start()
    return coordination


def _locate(config: RendezvousConfig) -> LeaderLocation:
    expected = tuple((config.leader_host, port) for port in config.ports)
    with contextlib.suppress(RecordsError, ValueError, KeyError, TypeError):
        return locate(config.records.situation(), config.incarnation, expected)
    return LeaderLocation(expected)


def _read_campaign(config: RendezvousConfig) -> CampaignRecords:
    newest = config.records.newest_epoch() or 0
    situation = config.records.situation()
    before = None
    with contextlib.suppress(RecordsError):
        # It only tells which agent this one follows.
        before = config.records.epoch(newest) if newest else None
    return CampaignRecords(newest, situation, before)


def _found(
    config: RendezvousConfig, secret: bytes, listener: socket.socket, journal: Callable[[Decision], None]
) -> Leader | None:
    """The leader of the first epoch, if nobody else is."""
    last = config.records.last_round()
    settings = dataclasses.replace(
        _settings(config),
        expected_nodes=config.expected_nodes,
        first_round=0 if last is None else last + 1,
        first_reason=Reason.REQUEUED if config.restart_count else Reason.START,
        first_failure=_last_failure(config, last),
    )
    campaign = Campaign(1, settings, last)
    if not _fenced_records(config, listener, campaign).claim():
        return None
    return _leader(config, secret, listener, campaign, journal)


def _last_failure(config: RendezvousConfig, last: int | None) -> str:
    """Return the fingerprint of the worker failure that was charged last, to an earlier incarnation; empty for none."""
    record = None
    with contextlib.suppress(RecordsError):
        record = config.records.round(last) if last is not None else None
    return last_failure(record or {})


def _settings(config: RendezvousConfig) -> Settings:
    options = config.options
    settings = Settings(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        valid_nodes=options.valid_nodes,
        max_restarts=config.max_restarts,
        agent=config.agent,
        join_timeout=options.join_timeout,
        last_call_timeout=options.last_call_timeout,
        heartbeat_limit=options.heartbeat_limit,
        leave_margin=options.leave_margin,
        min_round_time=options.min_round_time,
        on_tie=options.on_tie,
    )
    if config.choose_origin is not None:
        settings = dataclasses.replace(settings, choose_origin=config.choose_origin)
    return settings


def _fenced_records(config: RendezvousConfig, listener: socket.socket, campaign: Campaign) -> FencedRecords:
    port = listener.getsockname()[1]
    endpoint = {"address": config.address, "port": port, "epoch": campaign.term, "agent": config.agent}
    return FencedRecords(config.records, config.incarnation, campaign.term, endpoint, campaign.follows)


def _leader(
    config: RendezvousConfig,
    secret: bytes,
    listener: socket.socket,
    campaign: Campaign,
    journal: Callable[[Decision], None],
) -> Leader:
    controller = Controller()

    def nodes_down(nodes: Sequence[str]) -> frozenset[str]:
        states = controller.node_states(nodes)
        return frozenset(node for node, state in states.items() if state is NodeState.DOWN)

    def gone(agents: Sequence[str]) -> frozenset[str]:
        return agents_gone(agents, controller)

    return Leader(
        config.incarnation,
        secret,
        campaign.term,
        campaign.settings,
        _fenced_records(config, listener, campaign),
        journal,
        nodes_down,
        gone,
        campaign.endpoints,
    )


def _listen(config: RendezvousConfig, *, founder: bool) -> socket.socket:
    """Listen on one of the run's ports; for an agent that may never lead any other will do as well.

    Raises:
        UsageError: the one that a person has chosen is not free, for the leader that others expect here.
    """
    alone = config.expected_nodes == (config.node,) and config.leader_host == _LOOPBACK
    dual = not alone and socket.has_dualstack_ipv6()
    # A port that nobody had before: whoever listens where a lost agent did would be taken for it. Unless a person has
    # chosen one.
    chosen = len(config.ports) == 1
    others = (*config.ports, 0) if chosen else (0,)
    # Where the first leader listens is on record as well, so no other user keeps it out by taking all ports of the run.
    first = config.ports if chosen else (*config.ports, 0)
    for port in first if founder else others:
        try:
            return socket.create_server(
                (_LOOPBACK if alone else "", port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
            )
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    refusal = ports_exhausted(config.node, config.ports)
    if config.expected_nodes:
        # The others of the allocation expect the leader here and nowhere else, and would wait for it in vain.
        config.records.publish_endpoint({"refusal": str(refusal)})
    raise refusal
