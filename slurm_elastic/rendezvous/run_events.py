"""The leader's decisions as events that a person can read: who, why, how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_elastic.failures.causes import explanation
from slurm_elastic.rendezvous.membership import events
from slurm_elastic.rendezvous.membership.agents import Reason, WorkerFailure, node_of
from slurm_elastic.rendezvous.membership.assignment import Table


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of the run.

    Attributes:
        fields: the same facts for programs; times in seconds.
    """

    event: str
    text: str
    fields: dict[str, object] = field(default_factory=dict)


def describe(decision: events.Decision) -> Entry | None:
    """The event that a decision amounts to, None for what is of no interest to a person."""
    match decision:
        case events.Publish(table, seconds):
            return _formed(table, seconds)
        case events.Send(message=events.Stopping(round_, step, reason, node, detail, seconds)):
            text = f"round {round_} will end after step {step}: {_cause(reason, node, detail)}"
            text += f", within {seconds:.0f} s" if seconds is not None else ""
            return Entry("round_ending", text, {**_fields(round_, reason, node, detail), "step": step})
        case events.Interrupt(on_record=True):
            return None
        case events.Interrupt(agents, over, step=step, failure=failure) if agents or step is not None:
            round_, reason, node, detail = over.round, over.reason, over.node, over.detail
            text = f"round {round_} ends" + (f" after step {step}" if step is not None else "")
            text += f": {detail if decision.unusable else _cause(reason, node, detail)}{_explained(failure)}"
            fields = _fields(round_, reason, node, detail) | ({"step": step} if step is not None else {})
            fields |= {"unusable": decision.unusable} if decision.unusable else {}
            return Entry("round_ended", text, fields | _attribution(failure))
        case events.Drop(_, node, why, seconds):
            text = f"lost {node}: {why}, last sign of life {seconds:.1f} s ago"
            return Entry("node_lost", text, {"nodes": [node], "why": why, "silent_for": round(seconds, 3)})
        case events.Retire(_, node, leave):
            return Entry("node_left", f"{node} left: {leave.value}", {"nodes": [node], "why": leave.value})
        case events.Send((agent,), events.Waiting()):
            node = node_of(agent)
            return Entry("node_spare", f"{node} waits as a spare", {"nodes": [node]})
        case events.Claim(lost):
            text = "this agent leads the run from here on" + (f", and no more the one on {lost}" if lost else "")
            return Entry("leader_changed", text, {"nodes": _names(lost)})
        case events.Resign(agents) if agents:
            return Entry("leader_resigned", "this agent goes, and leads the run no more", {})
        case events.Finish(message=ended):
            return _finished(ended)
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


def _finished(ended: events.Ended) -> Entry:
    text = f"the run {ended.outcome.value.replace('_', ' ')}"
    if ended.outcome is events.Outcome.TIMED_OUT:
        text = "the run was given up"
    if ended.detail:
        text += f": {ended.detail}"
    fields: dict[str, object] = {"outcome": ended.outcome.value, "detail": ended.detail}
    if ended.failure is not None:
        text += _explained(ended.failure)
        fields |= {"nodes": [ended.failure.node], "rank": ended.failure.rank} | _attribution(ended.failure)
    return Entry("run_ended", text, fields)


def _explained(failure: WorkerFailure | None) -> str:
    if failure is None:
        return ""
    text = explanation(failure.cause, "" if failure.detail in failure.summary else failure.detail)
    return f"; {text}" if text else ""


def _attribution(failure: WorkerFailure | None) -> dict[str, object]:
    if failure is None or not failure.cause:
        return {}
    fields = {"rank": failure.rank, "cause": failure.cause, "domain": failure.domain, "outlook": failure.outlook}
    stragglers = [{"rank": rank, "node": node} for rank, node in failure.stragglers]
    return {**fields, "stragglers": stragglers} if stragglers else fields
