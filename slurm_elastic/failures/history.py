"""Judges the events of a run: strikes against nodes, which the next start does without, and loops. Pure functions.

A lost node is no strike: Slurm sets a node that has died DOWN by itself, and an agent can be lost for other reasons. No
loop ends a run. Times are by the clocks of nodes, so none is compared that is less than a minute apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        time: Seconds since 1970, by the clock of the node that has recorded it.
        weight: Strikes as which it counts; two make a bad node.
    """

    node: str
    time: float
    weight: int


def strikes(events: Iterable[tuple[float, Mapping[str, Any]]]) -> tuple[Strike, ...]:
    """Return the strikes among the events of a run."""
    events = tuple(events)
    explained = _explained_rounds(events)
    rounds = [(time, event.get("nodes") or ()) for time, event in events if event.get("event") == "round_formed"]
    struck: list[Strike] = []
    for time, event in events:
        match event:
            case {"event": "round_ended" | "run_ended", "stragglers": [*stragglers]}:
                names = (straggler.get("node") for straggler in stragglers if isinstance(straggler, Mapping))
                nodes = dict.fromkeys(node for node in names if isinstance(node, str))
                struck.extend(Strike(node, time, 1) for node in nodes)
            case {"event": "node_check_failed", "nodes": [str(node)]}:
                struck.append(Strike(node, time, _ENOUGH))
            case {"event": "agent_ended", "node": str(node), "no_leader_for": int() | float() as seconds} if any(
                time - seconds < formed <= time and node not in nodes for formed, nodes in rounds
            ):
                # The others have a leader, and this node does not reach it.
                struck.append(Strike(node, time, _ENOUGH))
            case {"event": "round_ended" | "run_ended", "nodes": [str(node)], "domain": "node", "outlook": "elsewhere"}:
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


def bad_nodes(found: Iterable[Strike], now: float) -> tuple[str, ...]:
    """Return the bad nodes, the worst first.

    Args:
        now: Seconds since 1970.
    """
    weights: dict[str, int] = {}
    newest: dict[str, float] = {}
    for strike in found:
        if now - strike.time < EXPIRY:
            weights[strike.node] = weights.get(strike.node, 0) + strike.weight
            newest[strike.node] = max(newest.get(strike.node, 0.0), strike.time)
    bad = [node for node, weight in weights.items() if weight >= _ENOUGH]
    return tuple(sorted(bad, key=lambda node: (-weights[node], -newest[node], node)))


def bad_domains(bad: Iterable[str], domains: Mapping[str, str]) -> dict[str, int]:
    """Return the failure domains that are bad themselves, and not their nodes, each with the number of these."""
    numbers = Counter(domains.get(node, "") for node in bad)
    return {domain: number for domain, number in numbers.items() if domain and number >= _MANY}


def nodes_to_exclude(bad: Sequence[str], domains: Mapping[str, str], most: int) -> tuple[str, ...]:
    """Return the nodes without which a run goes on; none if all nodes are bad, as it is not the nodes then.

    Args:
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


History = Sequence[tuple[float, Mapping[str, Any]]]
"""Events and progress of a run, in the order of their times, each with its time in seconds since 1970."""

_ROUNDS_WITHOUT = 5
_FACTOR = 4.0
_LEAST_WITHOUT = 2 * 3600.0
_COMEBACKS = 4
_FLAPPING_WINDOW = 6 * 3600.0
_CHANGES = 4
_LEADER_WINDOW = 3600.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Something that repeats without getting the run on.

    Attributes:
        loop: ``no_checkpoint``, ``node_flapping`` or ``leader_changes``.
        since: Seconds since 1970 at which it began.
    """

    loop: str
    text: str
    advice: str
    since: float
    nodes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A name that is the same as long as it goes on, at most for a day."""
        return ".".join((self.loop, *self.nodes, str(int(self.since // 86400))))


def find_loops(history: Iterable[tuple[float, Mapping[str, Any]]], now: float) -> tuple[Loop, ...]:
    """Return all loops.

    Args:
        now: Seconds since 1970.
    """
    ordered = sorted(history, key=lambda event: event[0])
    return tuple(loop for detector in DETECTORS for loop in detector(ordered, now))


def without_checkpoint(history: History, now: float) -> tuple[Loop, ...]:
    """Find that no checkpoint has got further in five rounds that failures or losses have ended, or for long.

    Long is four times the longest training between two checkpoints before, at least two hours. Only time counts in
    which a round ran. Without any checkpoint on record steps count instead, and rounds only.
    """
    reports = [(time, event, *_reached(event)) for time, event in history]
    saves = any(checkpoint is not None for _, _, checkpoint, _ in reports)
    best: int | None = None
    since, rounds, running, trained, longest = 0.0, 0, None, 0.0, 0.0
    for time, event, checkpoint, step in reports:
        mark = checkpoint if saves else step
        match event:
            case {"event": "round_formed"}:
                running = time
                since = since or time
            case {"event": "round_ended" | "run_ended"}:
                trained += 0.0 if running is None else time - running
                running = None
                rounds += event.get("reason") in ("worker_failed", "node_lost")
        if mark is not None and (best is None or mark > best):
            trained += 0.0 if running is None else time - running
            longest = max(longest, trained if best is not None else 0.0)
            best, since, rounds, trained = mark, time, 0, 0.0
            running = None if running is None else time
    trained += 0.0 if running is None else now - running
    what = f"checkpoint after step {best}" if saves else "step" if best is None else f"step after {best}"
    hours = trained / 3600
    if best is not None and rounds >= _ROUNDS_WITHOUT:
        text = f"no new {what} in {rounds} rounds that failures or losses have ended"
        advice = "look at the failures (slurm-elastic logs --errors), and save more often than rounds end"
        return (Loop("no_checkpoint", text, advice, since),)
    if saves and longest and trained > max(_LEAST_WITHOUT, _FACTOR * longest):
        text = f"no new {what} in {hours:.1f} h of training; before, one came within {longest / 3600:.1f} h"
        advice = "see whether steps go on and whether rank 0 can write (slurm-elastic status, top)"
        return (Loop("no_checkpoint", text, advice, since),)
    return ()


def flapping_nodes(history: History, now: float) -> tuple[Loop, ...]:
    """Find nodes that were lost, or failed their check, and joined again four times within six hours."""
    away: set[str] = set()
    comebacks: dict[str, list[float]] = {}
    for time, event in history:
        match event:
            case {"event": "node_lost" | "node_check_failed", "nodes": [*names]}:
                away.update(name for name in names if isinstance(name, str))
            case {"event": "round_formed", "nodes": [*names]}:
                back = away.intersection(name for name in names if isinstance(name, str))
                away -= back
                for name in back:
                    comebacks.setdefault(name, []).append(time)
    loops = []
    for node, times in sorted(comebacks.items()):
        recent = [time for time in times if now - time < _FLAPPING_WINDOW]
        if len(recent) >= _COMEBACKS:
            text = f"{node} was lost and has joined again {len(recent)} times in {_FLAPPING_WINDOW / 3600:.0f} h"
            advice = f"leave it out (sbatch --exclude={node}), and look at its network, memory and kernel log"
            loops.append(Loop("node_flapping", text, advice, recent[0], (node,)))
    return tuple(loops)


def leader_changes(history: History, now: float) -> tuple[Loop, ...]:
    """Find that the leader was lost and another one has followed four times within an hour."""
    lost: list[tuple[float, str]] = []
    for time, event in history:
        match event:
            case {"event": "leader_changed", "nodes": [str(name), *_]} if now - time < _LEADER_WINDOW:
                lost.append((time, name))
    if len(lost) < _CHANGES:
        return ()
    nodes = tuple(sorted({name for _, name in lost}))
    shown = ", ".join(nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    text = f"the leader has changed {len(lost)} times in an hour; lost on {shown}"
    advice = "choose a node that is not overloaded by --leader-node, or let slurm-elastic coordinator lead elsewhere"
    return (Loop("leader_changes", text, advice, lost[0][0]),)


DETECTORS = (without_checkpoint, flapping_nodes, leader_changes)


def _reached(event: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the newest checkpoint and the newest step that a record of progress has."""
    if event.get("event") == "progress":
        workers: object = [event]
    else:
        workers = event.get("workers") if event.get("event") == "workers_ended" else None
    records = [record for record in workers if isinstance(record, Mapping)] if isinstance(workers, list) else []
    checkpoints, steps = (
        [value for record in records if type(value := record.get(name)) is int] for name in ("checkpoint", "step")
    )
    return max(checkpoints, default=None), max(steps, default=None)
