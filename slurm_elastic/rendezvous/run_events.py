"""The leader's decisions as events that a person can read: who, why, how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_elastic.failures import explanation
from slurm_elastic.rendezvous.membership import (
    Claim,
    Decision,
    Drop,
    Finish,
    Interrupt,
    Outcome,
    Publish,
    Reason,
    Resign,
    Retire,
    Spare,
    StopAt,
    Table,
    WorkerFailure,
)

__all__ = ["Entry", "describe"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of the run.

    Attributes:
        event: its kind, such as ``round_formed``.
        text: one line.
        fields: the same facts for programs; times in seconds.
    """

    event: str
    text: str
    fields: dict[str, object] = field(default_factory=dict)


def describe(decision: Decision) -> Entry | None:
    """The event that a decision amounts to, None for what is of no interest to a person."""
    match decision:
        case Publish(table, seconds):
            return _formed(table, seconds)
        case StopAt(_, round_, step, reason, node, seconds, detail):
            text = f"round {round_} will end after step {step}: {_cause(reason, node, detail)}"
            text += f", within {seconds:.0f} s" if seconds is not None else ""
            return Entry("round_ending", text, {**_fields(round_, reason, node, detail), "step": step})
        case Interrupt(on_record=True):
            return None
        case Interrupt(agents, round_, reason, node, detail, step, failure=failure) if agents or step is not None:
            text = f"round {round_} ends" + (f" after step {step}" if step is not None else "")
            text += f": {_cause(reason, node, detail)}{_explained(failure)}"
            fields = _fields(round_, reason, node, detail) | ({"step": step} if step is not None else {})
            return Entry("round_ended", text, fields | _attribution(failure))
        case Drop(_, node, why, seconds):
            text = f"lost {node}: {why}, last sign of life {seconds:.1f} s ago"
            return Entry("node_lost", text, {"nodes": [node], "why": why, "silent_for": round(seconds, 3)})
        case Retire(_, node, leave):
            return Entry("node_left", f"{node} left: {leave.value}", {"nodes": [node], "why": leave.value})
        case Spare(_, node):
            return Entry("node_spare", f"{node} waits as a spare", {"nodes": [node]})
        case Claim(lost):
            text = "this agent leads the run from here on" + (f", and no more the one on {lost}" if lost else "")
            return Entry("leader_changed", text, {"nodes": _names(lost)})
        case Resign(agents) if agents:
            return Entry("leader_resigned", "this agent goes, and leads the run no more", {})
        case Finish():
            return _finished(decision)
        case _:
            return None


def _cause(reason: Reason, node: str, detail: str) -> str:
    nodes = f", {_shown(_names(node))}" if node else ""
    return reason.value.replace("_", " ") + nodes + (f" ({detail})" if detail else "")


def _fields(round_: int, reason: Reason, node: str, detail: str) -> dict[str, object]:
    return {"round": round_, "reason": reason.value, "nodes": _names(node), "detail": detail}


def _names(nodes: str) -> list[str]:
    """Apart again; the machine names those that come or go together as one text."""
    return nodes.split(", ") if nodes else []


def _shown(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 8 else f"{', '.join(nodes[:3])}, ... {nodes[-1]}"


def _formed(table: Table, seconds: float) -> Entry:
    nodes = [place.node for place in table.places]
    workers = f"{table.world_size} worker{'s' if table.world_size != 1 else ''}"
    counted = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    text = f"round {table.round} formed after {table.reason.value.replace('_', ' ')} in {seconds:.2f} s: "
    text += f"{counted} ({_shown(nodes)}), {workers}"
    if table.restarts:
        text += f", {table.restarts} restart{'s' if table.restarts != 1 else ''} charged"
    fields: dict[str, object] = {
        "round": table.round,
        "reason": table.reason.value,
        "nodes": nodes,
        "world_size": table.world_size,
        "restarts": table.restarts,
        "seconds": round(seconds, 4),
    }
    return Entry("round_formed", text, fields)


def _finished(decision: Finish) -> Entry:
    text = f"the run {decision.outcome.value.replace('_', ' ')}"
    if decision.outcome is Outcome.TIMED_OUT:
        text = "the run was given up"
    if decision.detail:
        text += f": {decision.detail}"
    fields: dict[str, object] = {"outcome": decision.outcome.value, "detail": decision.detail}
    if decision.failure is not None:
        text += _explained(decision.failure)
        fields |= {"nodes": [decision.failure.node], "rank": decision.failure.rank} | _attribution(decision.failure)
    return Entry("run_ended", text, fields)


def _explained(failure: WorkerFailure | None) -> str:
    told = "" if failure is None else explanation(failure.cause, failure.detail)
    return f"; {told}" if told else ""


def _attribution(failure: WorkerFailure | None) -> dict[str, object]:
    if failure is None or not failure.cause:
        return {}
    return {"rank": failure.rank, "cause": failure.cause, "domain": failure.domain, "outlook": failure.outlook}
