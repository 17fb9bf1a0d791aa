"""Who is in the next round: a pure state machine, without I/O, clock or threads.

:func:`step` takes the state, one event and the leader's monotonic time, and returns the next state and what has to be
done. Everything that the leader decides is decided here; everything that it does is done elsewhere.
"""

from slurm_elastic.rendezvous.membership.conditions import next_deadline
from slurm_elastic.rendezvous.membership.decisions import (
    Decision,
    Drop,
    Finish,
    Hold,
    Interrupt,
    Outcome,
    Probe,
    Publish,
    Resend,
    Retire,
    Spare,
    StopAt,
)
from slurm_elastic.rendezvous.membership.events import (
    Closed,
    Connected,
    Disconnected,
    Event,
    Finished,
    Heard,
    Held,
    Joined,
    Leaving,
    Left,
    NodesSeen,
    Ponged,
    Tick,
    WorkerFailed,
)
from slurm_elastic.rendezvous.membership.machine import step
from slurm_elastic.rendezvous.membership.reasons import LeaveReason, Reason
from slurm_elastic.rendezvous.membership.settings import Settings
from slurm_elastic.rendezvous.membership.state import (
    Candidate,
    Phase,
    State,
    Status,
    Winding,
    WorkerFailure,
    initial_state,
)
from slurm_elastic.rendezvous.membership.table import Place, Table, build_table
from slurm_elastic.rendezvous.membership.winding import seconds_to_stop

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
    "Held",
    "Hold",
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
    "StopAt",
    "Table",
    "Tick",
    "Winding",
    "WorkerFailed",
    "WorkerFailure",
    "build_table",
    "initial_state",
    "next_deadline",
    "seconds_to_stop",
    "step",
]
