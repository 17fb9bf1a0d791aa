"""Decides who is in the next round: a pure state machine, without I/O, clock or threads.

:func:`step` takes the state, one event and the leader's monotonic time, and returns the next state and what has to be
done. Everything that the leader decides is decided here; everything that it does is done elsewhere.
"""

from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.agents import STEPPED, AgentInfo, Status, WorkerFailure, root_of
from slurm_elastic.rendezvous.membership.assignment import Place, Table, build_table
from slurm_elastic.rendezvous.membership.config import Settings, adapted_limit
from slurm_elastic.rendezvous.membership.decisions import (
    Claim,
    Decision,
    Drop,
    Finish,
    Interrupt,
    Publish,
    Resend,
    Resign,
    Retire,
    Send,
    Spare,
)
from slurm_elastic.rendezvous.membership.events import (
    Claimed,
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Gone,
    Held,
    Joined,
    Leaving,
    Left,
    MemberMessage,
    NodesDown,
    Ponged,
    Returning,
    SignsOfLife,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.leader_change import blocks_election, misses_members, missing
from slurm_elastic.rendezvous.membership.machine import step
from slurm_elastic.rendezvous.membership.messages import (
    Ended,
    Holding,
    Interrupted,
    MembershipMessage,
    Outcome,
    Probed,
    Resigned,
    Stopping,
    Waiting,
)
from slurm_elastic.rendezvous.membership.planned_stop import seconds_to_stop
from slurm_elastic.rendezvous.membership.quorum import Base, OnTie, has_quorum, unaccounted
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.state import Phase, PlannedStop, State, initial_state
from slurm_elastic.rendezvous.membership.stragglers import Collective, WorkerPosition

__all__ = [
    "STEPPED",
    "Base",
    "AgentInfo",
    "Claim",
    "Claimed",
    "Closed",
    "Collective",
    "Connected",
    "Decision",
    "Disconnected",
    "Drop",
    "Ended",
    "Event",
    "Finish",
    "Finished",
    "Gone",
    "SignsOfLife",
    "Held",
    "Holding",
    "Interrupt",
    "Interrupted",
    "Joined",
    "LeaveReason",
    "Leaving",
    "Left",
    "MemberMessage",
    "MembershipMessage",
    "NodesDown",
    "OnTie",
    "Outcome",
    "Phase",
    "Place",
    "Ponged",
    "Probed",
    "Publish",
    "Reason",
    "Resend",
    "Resign",
    "Resigned",
    "Retire",
    "Returning",
    "Send",
    "Settings",
    "Spare",
    "State",
    "Status",
    "Stopping",
    "Table",
    "Tick",
    "PlannedStop",
    "Waiting",
    "WorkerFailed",
    "WorkerFailure",
    "WorkerPosition",
    "adapted_limit",
    "build_table",
    "has_quorum",
    "initial_state",
    "blocks_election",
    "misses_members",
    "missing",
    "next_deadline",
    "replace",
    "root_of",
    "seconds_to_stop",
    "step",
    "unaccounted",
]
