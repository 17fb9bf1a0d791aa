"""The actions and events of a term, as data."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.rendezvous import membership
from slurm_elastic.rendezvous.membership import (
    Decision,
    Finish,
    State,
    Table,
)

# Actions. Those of the records are answered by RecordsAnswered or RecordsFailed.


@dataclass(frozen=True, slots=True)
class ClaimTerm:
    """Take the term; allowed unless another agent has it."""


@dataclass(frozen=True, slots=True)
class ConfirmLastRound:
    """Read the last round; allowed if it is the one that this term follows."""


@dataclass(frozen=True, slots=True)
class PublishEndpoint:
    """Write the leader's endpoint down."""


@dataclass(frozen=True, slots=True)
class CheckTerm:
    """Read the newest term; allowed if it is this one.

    Attributes:
        watching: True for a reading that no record waits for.
    """

    watching: bool = False


@dataclass(frozen=True, slots=True)
class WriteRound:
    """Write a round down; allowed unless another leader has written one of that number."""

    table: Table


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Write down that the run has ended; allowed if this term is the newest."""

    finish: Finish


RecordsAction = ClaimTerm | ConfirmLastRound | PublishEndpoint | CheckTerm | WriteRound | RecordEnd


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Carry out a decision: send its messages, and log it.

    Attributes:
        state: The state of the membership after the decision.
        decision: The decision, which is on record already if it has to be.
        log: True if the log of the run gets the decision.
    """

    state: State
    decision: Decision
    log: bool


@dataclass(frozen=True, slots=True)
class ProbeMembers:
    """Ask the nodes of these members whether they have ended. Answered by AgentsEnded."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeDisconnected:
    """Ask the node of an agent whose connection broke whether its process has ended. Answered by DisconnectedEnded if
    it has: then the leader does not wait for the connection to come back.
    """

    agent: str


@dataclass(frozen=True, slots=True)
class AskSlurmAboutAgents:
    """Ask Slurm which of these members are gone. Answered by AgentsGone."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskSlurmAboutNodes:
    """Ask Slurm which of these nodes are down. Answered by NodesDown."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportClaimed:
    """The term is claimed, confirmed and published: this agent leads."""


@dataclass(frozen=True, slots=True)
class ReportBlocking:
    """This candidate keeps members of the last round from each other, or does so no more."""

    blocks: bool


@dataclass(frozen=True, slots=True)
class StepDown:
    """Lead no more.

    Attributes:
        why: one line; empty after a resignation.
        failed: whether a person has to fix something.
    """

    why: str = ""
    failed: bool = False


Question = ProbeMembers | AskSlurmAboutAgents | AskSlurmAboutNodes

TermAction = (
    RecordsAction
    | CarryOut
    | ProbeMembers
    | ProbeDisconnected
    | AskSlurmAboutAgents
    | AskSlurmAboutNodes
    | ReportClaimed
    | ReportBlocking
    | StepDown
)


# Events, beside those of the membership.


@dataclass(frozen=True, slots=True)
class Wake:
    """The moment that :attr:`Term.deadline` names has come."""


@dataclass(frozen=True, slots=True)
class RecordsAnswered:
    """An action on the records is through, and was allowed or not."""

    action: RecordsAction
    allowed: bool


@dataclass(frozen=True, slots=True)
class RecordsFailed:
    """The records did not answer, or cannot be used: nothing is known of what a write did."""

    action: RecordsAction
    why: str


@dataclass(frozen=True, slots=True)
class AgentsEnded:
    """The nodes say that these processes have ended."""

    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class DisconnectedEnded:
    """The node of an agent whose connection broke says that its process has ended."""

    agent: str


@dataclass(frozen=True, slots=True)
class AgentsGone:
    """Slurm says that these agents are gone."""

    agents: frozenset[str]


TermEvent = membership.Event | Wake | RecordsAnswered | RecordsFailed | AgentsEnded | DisconnectedEnded | AgentsGone
