"""Where one agent sits in its run, and how it gets in touch with the others from there."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.coordination import Coordination
from slurm_elastic.rendezvous.leader import Leader
from slurm_elastic.rendezvous.ledger import Ledger
from slurm_elastic.rendezvous.member import LeaderRefusedError, MemberSettings
from slurm_elastic.rendezvous.membership import Candidate, Decision, Reason, Settings
from slurm_elastic.rendezvous.options import RendezvousOptions
from slurm_elastic.rendezvous.records import Records, RecordsError
from slurm_elastic.rundir import RunDir, incarnation
from slurm_elastic.slurm import Controller, NodeState, ports_exhausted

__all__ = ["Seat", "connect"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Seat:
    """One agent of one run, before it has talked to anybody.

    Attributes:
        run_id: of the run.
        run_dir: opened.
        records: of this incarnation.
        restart_count: how often Slurm has requeued the job; keeps incarnations of an allocation apart.
        agent, node, position: see :class:`~slurm_elastic.rendezvous.membership.Candidate`.
        address: at which other nodes reach this agent.
        local_world_size, role: of its workers.
        expected_nodes: see :class:`~slurm_elastic.rendezvous.membership.Settings`.
        min_nodes, max_nodes, max_restarts: bounds of the run.
        may_lead: whether this agent leads the run if nobody has led this incarnation yet.
        leader_host: where the leader is expected, until the records tell.
        ports: of the leader, in the order to try.
        options: times.
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

    @property
    def incarnation(self) -> str:
        """Name of this incarnation of the run; agents of another one are strangers."""
        return incarnation(self.run_id, self.restart_count)

    def candidate(self, store_port: int) -> Candidate:
        """What this agent says of itself when it joins."""
        return Candidate(
            agent=self.agent,
            node=self.node,
            position=self.position,
            local_world_size=self.local_world_size,
            role=self.role,
            address=self.address,
            store_port=store_port,
        )


def connect(seat: Seat, journal: Callable[[Decision], None], *, can_hold: bool = False) -> Coordination:
    """Get in touch with the run's leader, or lead.

    The first of the agents that may lead takes the first epoch of the incarnation and leads; its place is published
    in the records. In an allocation it is also where everybody expects it, whatever the records show so far.

    Args:
        seat: of this agent.
        journal: told every decision of the leader, on the leading agent.
        can_hold: see :class:`~slurm_elastic.rendezvous.member.MemberSettings`.

    Raises:
        UsageError: no port is free for the leader, or the run's secret cannot be used.
        RecordsError: the records of the run cannot be used.
    """
    secret = seat.run_dir.secret()
    leader = _lead(seat, secret, journal) if seat.may_lead else None
    # The leader's own link takes the loopback: it must stand whatever the network does.
    own = [(_LOOPBACK, leader[1].getsockname()[1])] if leader is not None else None
    coordination = Coordination(
        MemberSettings(
            run=seat.incarnation,
            secret=secret,
            agent=seat.agent,
            locate=lambda: own or _whereabouts(seat),
            connect_timeout=seat.options.join_timeout,
            heartbeat_limit=seat.options.heartbeat_limit,
            leader_limit=seat.options.leader_limit,
            can_hold=can_hold,
        ),
        leader,
        seat.records.stop_waiting,
    )
    seat.records.on_loss(coordination.records_lost)
    coordination.start()
    return coordination


def _whereabouts(seat: Seat) -> list[tuple[str, int]]:
    with contextlib.suppress(RecordsError, ValueError, KeyError, TypeError):
        endpoint = seat.records.endpoint()
        if endpoint is not None:
            if "refusal" in endpoint:
                raise LeaderRefusedError(str(endpoint["refusal"]))
            return [(str(endpoint["address"]), int(endpoint["port"]))]
    return [(seat.leader_host, port) for port in seat.ports]


def _lead(seat: Seat, secret: bytes, journal: Callable[[Decision], None]) -> tuple[Leader, socket.socket] | None:
    if seat.records.newest_epoch() is not None:
        return None
    try:
        listener = _listen(seat)
    except UsageError as error:
        if seat.expected_nodes:
            # The others of the allocation expect the leader here and nowhere else, and would wait for it in vain.
            seat.records.publish_endpoint({"refusal": str(error)})
        raise
    epoch = 1
    if not seat.records.claim_epoch(epoch, {"agent": seat.agent}):
        listener.close()
        return None
    endpoint = {"address": seat.address, "port": listener.getsockname()[1], "epoch": epoch, "agent": seat.agent}
    seat.records.publish_endpoint(endpoint)
    options, controller = seat.options, Controller()
    last_round = seat.records.last_round()
    settings = Settings(
        min_nodes=seat.min_nodes,
        max_nodes=seat.max_nodes,
        max_restarts=seat.max_restarts,
        expected_nodes=seat.expected_nodes,
        first_round=0 if last_round is None else last_round + 1,
        first_reason=Reason.REQUEUED if seat.restart_count else Reason.START,
        join_timeout=options.join_timeout,
        last_call_timeout=options.last_call_timeout,
        heartbeat_limit=options.heartbeat_limit,
        leave_margin=options.leave_margin,
        min_round_time=options.min_round_time,
    )

    def nodes_down(nodes: Sequence[str]) -> frozenset[str]:
        states = controller.node_states(nodes)
        return frozenset(node for node, state in states.items() if state is NodeState.DOWN)

    ledger = Ledger(seat.records, epoch)
    return Leader(seat.incarnation, secret, epoch, settings, ledger, journal, nodes_down), listener


def _listen(seat: Seat) -> socket.socket:
    alone = seat.expected_nodes == (seat.node,) and seat.leader_host == _LOOPBACK
    dual = not alone and socket.has_dualstack_ipv6()
    for port in seat.ports:
        try:
            return socket.create_server(
                (_LOOPBACK if alone else "", port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
            )
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise ports_exhausted(seat.node, seat.ports)
