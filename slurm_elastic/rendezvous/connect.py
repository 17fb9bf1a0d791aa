"""The configuration of one agent of a run, and how it gets in touch with the others."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.election.campaign import Campaign, CampaignRecords, ElectionConfig, LeaderLoss, plan
from slurm_elastic.rendezvous.election.runner import Runner
from slurm_elastic.rendezvous.leader.absent_agents import own_releases
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Reason
from slurm_elastic.rendezvous.membership.config import RoundOptions, Settings, no_origin
from slurm_elastic.rendezvous.membership.events import Decision
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records.api import Records, Situation
from slurm_elastic.rendezvous.thread import Coordination
from slurm_elastic.rundir import RunDir
from slurm_elastic.slurm import Controller

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
"""Connections that wait in the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """One agent of one run, before it has connected to a leader.

    Attributes:
        incarnation: The name of this incarnation of the run; agents of another one are strangers.
        agent, node, position, cohort, domain: See :class:`~slurm_elastic.rendezvous.membership.agents.AgentInfo`; of
            the cohort name and size.
        address: The address at which other nodes reach this agent.
        expected_nodes, choose_origin: See :class:`~slurm_elastic.rendezvous.membership.config.Settings`.
        may_lead: True if this agent leads the run when no agent has led this incarnation yet.
        leader_host: The host where agents expect the leader until the records have its endpoint.
        ports: Ports of the leader, in the order to try.
        has_workers: True if this agent wants places in rounds; False for a coordinator, which only leads.
        interface: The network interface of the data network; empty if the user has named none.
        gloo_interface: The same, else where needed that of `address`; see :func:`~slurm_elastic.slurm.gloo_interface`.
    """

    run_id: str
    run_dir: RunDir
    records: Records
    restart_count: int = 0
    incarnation: str
    agent: str
    node: str
    position: int = 0
    address: str
    local_world_size: int = 0
    role: str = ""
    expected_nodes: tuple[str, ...] = ()
    min_nodes: int
    max_nodes: int
    max_restarts: int
    may_lead: bool
    leader_host: str
    ports: tuple[int, ...]
    options: RendezvousOptions
    has_workers: bool = True
    cohort: tuple[str, int] = ("", 1)
    domain: str = ""
    interface: str = ""
    gloo_interface: str = ""
    choose_origin: Callable[[int | None, str, Sequence[str], bool], str] = no_origin

    def agent_info(self, store_port: int, inventory: str = "", ran: float = 0.0, *, proven: bool = False) -> AgentInfo:
        """Return the description of this agent with which it joins."""
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
            inventory=inventory,
            ran=ran,
            proven=proven,
            domain=self.domain,
        )


def connect(config: RendezvousConfig, journal: Callable[[Decision], None], *, can_hold: bool = False) -> Coordination:
    """Start the thread that follows the run's leader, or leads.

    Args:
        journal: Called with every decision of the leader, on the leading agent.
        can_hold: See :class:`~slurm_elastic.rendezvous.election.campaign.ElectionConfig`.

    Raises:
        UsageError: The run's secret cannot be read.
        RecordsError: The records of the run cannot be read or written.
    """
    secret = config.run_dir.secret()
    founder = config.may_lead and config.records.newest_epoch() is None
    listener = _listen(config, founder=founder)
    port: int = listener.getsockname()[1]
    election = ElectionConfig(
        incarnation=config.incarnation,
        settings=_settings(config),
        # The loopback works whatever the network does.
        endpoints=tuple((address, port) for address in dict.fromkeys((_LOOPBACK, config.address))),
        expected=tuple((config.leader_host, port) for port in config.ports),
        leader_limit=config.options.leader_limit,
        has_workers=config.has_workers,
        can_hold=can_hold,
        directory=str(config.run_dir.path),
    )

    def fenced_records(campaign: Campaign) -> FencedRecords:
        endpoint = {"address": config.address, "port": port, "epoch": campaign.term, "agent": config.agent}
        return FencedRecords(config.records, config.incarnation, campaign.term, endpoint, campaign.follows)

    def leader(campaign: Campaign) -> Leader:
        return Leader(config.incarnation, secret, campaign, fenced_records(campaign), journal, Controller())

    first = _first_term(election, config.records) if founder else None
    if first is not None and not fenced_records(first).claim():
        first = None
    make_runner = functools.partial(Runner, election, secret, config.records, listener, leader, first)
    coordination = Coordination(make_runner, config.records, port)
    coordination.start()
    return coordination


def _first_term(config: ElectionConfig, records: Records) -> Campaign:
    """Return the first term of the incarnation, which no agent has claimed yet."""
    try:
        situation = records.situation()
    except RecordsError:
        situation = Situation(None, records.last_round(), None)
    # The record of a round of an earlier incarnation can be done without.
    situation = dataclasses.replace(situation, round=situation.round or {})
    first = plan(config, CampaignRecords(0, situation), LeaderLoss(config.settings.first_reason))
    return dataclasses.replace(first, settings=dataclasses.replace(first.settings, claimed=True))


def _settings(config: RendezvousConfig) -> Settings:
    options = {field.name: getattr(config.options, field.name) for field in dataclasses.fields(RoundOptions)}
    return Settings(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        expected_nodes=config.expected_nodes,
        first_reason=Reason.REQUEUED if config.restart_count else Reason.START,
        agent=config.agent,
        choose_origin=config.choose_origin,
        **options,
    )


def _listen(config: RendezvousConfig, *, founder: bool) -> socket.socket:
    """Listen on one of the run's ports, where others expect the first leader, or else on any that is free."""
    alone = config.expected_nodes == (config.node,) and config.leader_host == _LOOPBACK
    dual = not alone and socket.has_dualstack_ipv6()
    address, family = _LOOPBACK if alone else "", socket.AF_INET6 if dual else socket.AF_INET
    listen = functools.partial(socket.create_server, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    # A port that no agent had before, unless a person has chosen one: other agents would take a process that listens on
    # the port of a lost agent for that agent.
    chosen = len(config.ports) == 1
    for port in config.ports if founder or chosen else ():
        try:
            return listen((address, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # Where the first leader listens is on record as well, so no other user keeps it out by taking all ports of the run.
    if founder and chosen:
        logger.warning("port %d is in use on %s; this agent leads on another one", config.ports[0], config.node)
    return listen((address, 0))
