"""Decides who is in the next round: a pure state machine, without I/O, clock or threads.

:func:`step` takes the state, one event and the leader's monotonic time, and returns the next state and what has to be
done. Everything that the leader decides is decided here; everything that it does is done elsewhere.
"""

from slurm_elastic.rendezvous.membership._replace import replace
from slurm_elastic.rendezvous.membership.advance import next_deadline
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Status, WorkerFailure, root_of
from slurm_elastic.rendezvous.membership.assignment import Place, Table, build_table
from slurm_elastic.rendezvous.membership.config import Settings, adapted_limit
from slurm_elastic.rendezvous.membership.decisions import (
    Claim,
    Decision,
    Drop,
    Finish,
    Hold,
    Interrupt,
    Outcome,
    Probe,
    Publish,
    Resend,
    Resign,
    Retire,
    Spare,
    StopAt,
)
from slurm_elastic.rendezvous.membership.events import (
    Claimed,
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Gone,
    Heard,
    Held,
    Joined,
    Leaving,
    Left,
    NodesSeen,
    Ponged,
    Returning,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.leader_change import in_the_way, misses_members, missing
from slurm_elastic.rendezvous.membership.machine import step
from slurm_elastic.rendezvous.membership.planned_stop import seconds_to_stop
from slurm_elastic.rendezvous.membership.quorum import Base, OnTie, has_quorum, unaccounted
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.state import Phase, PlannedStop, State, initial_state
from slurm_elastic.rendezvous.membership.stragglers import Slowest

__all__ = [
    "Base",
    "AgentInfo",
    "Claim",
    "Claimed",
    "Closed",
    "Connected",
    "Decision",
    "Disconnected",
    "Drop",
    "Event",
    "Finish",
    "Finished",
    "Gone",
    "Heard",
    "Held",
    "Hold",
    "Interrupt",
    "Joined",
    "LeaveReason",
    "Leaving",
    "Left",
    "NodesSeen",
    "OnTie",
    "Outcome",
    "Phase",
    "Place",
    "Ponged",
    "Probe",
    "Publish",
    "Reason",
    "Resend",
    "Resign",
    "Retire",
    "Returning",
    "Settings",
    "Slowest",
    "Spare",
    "State",
    "Status",
    "StopAt",
    "Table",
    "Tick",
    "PlannedStop",
    "WorkerFailed",
    "WorkerFailure",
    "adapted_limit",
    "build_table",
    "has_quorum",
    "initial_state",
    "in_the_way",
    "misses_members",
    "missing",
    "next_deadline",
    "replace",
    "root_of",
    "seconds_to_stop",
    "step",
    "unaccounted",
]
