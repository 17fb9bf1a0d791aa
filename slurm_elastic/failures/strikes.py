"""Strikes: the events that speak against a node, and the nodes that the next start of a job does without. Pure.

A lost node is no strike: Slurm sets a node that has died DOWN by itself, and an agent can be lost for other reasons.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.failures.registry import Domain, Outlook

EXPIRY = 24 * 3600.0
"""Seconds after which a strike counts no more. They are by the clocks of nodes, which differ by less."""
_ENOUGH = 2
_MANY = 3
"""Bad nodes of one failure domain, such as a switch: then it is the domain."""
_ELEMENT = re.compile(r"[0-9]+_[0-9]+")


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike.

    Attributes:
        node: Slurm's name of the node.
        time: Seconds since 1970, by the clock of the node that has recorded it.
        weight: Strikes as which it counts; two make a bad node.
    """

    node: str
    time: float
    weight: int


def strikes(events: Iterable[tuple[float, Mapping[str, Any]]]) -> tuple[Strike, ...]:
    """Return the strikes among the events of a run.

    Args:
        events: Each with its time in seconds since 1970.
    """
    events = tuple(events)
    explained = _explained_rounds(events)
    rounds = [(time, event.get("nodes") or ()) for time, event in events if event.get("event") == "round_formed"]
    struck: list[Strike] = []
    for time, event in events:
        match event:
            case {"event": "round_ended" | "run_ended", "stragglers": [*stragglers]}:
                nodes = dict.fromkeys(node for straggler in stragglers for node in _straggler_nodes(straggler))
                struck.extend(Strike(node, time, 1) for node in nodes)
            case {"event": "node_check_failed", "nodes": [str(node)]}:
                struck.append(Strike(node, time, _ENOUGH))
            case {"event": "agent_ended", "node": str(node), "no_leader_for": int() | float() as seconds} if any(
                time - seconds < formed <= time and node not in nodes for formed, nodes in rounds
            ):
                # The others have a leader, and this node does not reach it.
                struck.append(Strike(node, time, _ENOUGH))
            case {"event": "round_ended" | "run_ended", "nodes": [str(node)], "domain": Domain.NODE.value} if (
                event.get("outlook") == Outlook.ELSEWHERE.value
            ):
                struck.append(Strike(node, time, 1))
            case {"event": "worker_hung", "node": str(node)} if event.get("round") not in explained:
                # One that waited for another one tells nothing about its node.
                if event.get("in_collective") is not True:
                    struck.append(Strike(node, time, 1))
            case {"event": "rank_slow", "nodes": [str(node)], "rank": int(rank)} if rank:
                # Rank 0 of many scripts has more to do.
                struck.append(Strike(node, time, 1))
    return tuple(struck)


def _explained_rounds(events: Iterable[tuple[float, Mapping[str, Any]]]) -> set[object]:
    """Return the rounds of which it is known who the others waited for; a run ends in its newest round."""
    rounds, newest = set(), None
    for _, event in sorted(events, key=lambda pair: pair[0]):
        newest = event.get("round", newest)
        if event.get("stragglers"):
            rounds.add(event.get("round", newest))
    return rounds


def _straggler_nodes(straggler: object) -> Iterator[str]:
    match straggler:
        case {"node": str(node)}:
            yield node


def node_domains(events: Iterable[tuple[float, Mapping[str, Any]]]) -> dict[str, str]:
    """Return the failure domain of each node of a run; empty if none is known.

    A job or an element of an array is no place, and is left out: its next start has other nodes.

    Args:
        events: Events and progress, each with its time in seconds since 1970.
    """
    domains: dict[str, str] = {}
    for _, event in sorted(events, key=lambda each: each[0]):
        match event:
            case {"event": "round_formed", "nodes": [*nodes]}:
                domains = {**{node: "" for node in nodes if isinstance(node, str)}, **domains}
            case {"event": "agent_started", "node": str(node), "agent": str(agent), "domain": str(label)}:
                first, _, rest = label.partition("/")
                domains[node] = rest if f"/{first}." in agent or _ELEMENT.fullmatch(first) else label
    return domains


def bad_nodes(found: Iterable[Strike], now: float, expiry: float = EXPIRY) -> tuple[str, ...]:
    """Return the bad nodes, the worst first.

    Args:
        found: All strikes.
        now: Seconds since 1970.
        expiry: Seconds after which a strike counts no more.
    """
    weights: dict[str, int] = {}
    newest: dict[str, float] = {}
    for strike in found:
        if now - strike.time < expiry:
            weights[strike.node] = weights.get(strike.node, 0) + strike.weight
            newest[strike.node] = max(newest.get(strike.node, 0.0), strike.time)
    bad = [node for node, weight in weights.items() if weight >= _ENOUGH]
    return tuple(sorted(bad, key=lambda node: (-weights[node], -newest[node], node)))


def bad_domains(bad: Iterable[str], domains: Mapping[str, str]) -> dict[str, int]:
    """Return the failure domains that are bad themselves, and not their nodes, each with the number of these.

    Args:
        bad: The bad nodes.
        domains: Of all nodes of the run.
    """
    numbers = Counter(domains.get(node, "") for node in bad)
    return {domain: number for domain, number in numbers.items() if domain and number >= _MANY}


def nodes_to_exclude(bad: Sequence[str], domains: Mapping[str, str], most: int) -> tuple[str, ...]:
    """Return the nodes without which a run goes on; none if all nodes are bad, as it is not the nodes then.

    Args:
        bad: The bad nodes, the worst first.
        domains: Of all nodes of the run.
        most: Maximum of nodes; a bad domain with all its nodes counts as one.
    """
    if set(domains) <= set(bad):
        return ()
    whole = bad_domains(bad, domains)

    def part(node: str) -> tuple[str, str]:
        domain = domains.get(node, "")
        return ("", domain) if domain in whole else (node, "")

    worst = [*dict.fromkeys(part(node) for node in bad)][:most]
    nodes = [node for node in dict.fromkeys([*bad, *domains]) if part(node) in worst]
    return tuple(bad[:most] if set(domains) <= set(nodes) else nodes)


def exclusion(present: Iterable[str], ours: Collection[str], bad: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes that a job is to exclude from now on.

    Args:
        present: The nodes that it excludes now.
        ours: Those of them that an earlier requeue has added; the others are the user's.
        bad: The bad nodes.
    """
    users = [node for node in present if node not in ours]
    return tuple(dict.fromkeys([*users, *bad]))
