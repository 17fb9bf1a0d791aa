"""Who is in the next round: a pure state machine, without I/O, clock or threads.

:func:`step` takes the state, one event and the leader's monotonic time, and returns the next state and what has to be
done. Everything that the leader decides is decided here; everything that it does is done elsewhere.
"""

from slurm_elastic.rendezvous.membership.conditions import next_deadline
from slurm_elastic.rendezvous.membership.decisions import (
    Decision,
    Drop,
    Finish,
    Interrupt,
    Outcome,
    Probe,
    Publish,
    Resend,
    Retire,
    Spare,
)
from slurm_elastic.rendezvous.membership.events import (
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Heard,
    Joined,
    Leaving,
    Left,
    NodesSeen,
    Ponged,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.machine import step
from slurm_elastic.rendezvous.membership.state import (
    Candidate,
    LeaveReason,
    Phase,
    Reason,
    Settings,
    State,
    Status,
    WorkerFailure,
    initial_state,
)
from slurm_elastic.rendezvous.membership.table import Place, Table, build_table

__all__ = [
    "Candidate",
    "Closed",
    "Connected",
    "Decision",
    "Disconnected",
    "Drop",
    "Event",
    "Finish",
    "Finished",
    "Heard",
    "Interrupt",
    "Joined",
    "LeaveReason",
    "Leaving",
    "Left",
    "NodesSeen",
    "Outcome",
    "Phase",
    "Place",
    "Ponged",
    "Probe",
    "Publish",
    "Reason",
    "Resend",
    "Retire",
    "Settings",
    "Spare",
    "State",
    "Status",
    "Table",
    "Tick",
    "WorkerFailed",
    "WorkerFailure",
    "build_table",
    "initial_state",
    "next_deadline",
    "step",
]
