"""Schedules drawn from a seed: the same seed gives the same one."""

from __future__ import annotations

import random
from dataclasses import replace

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.membership.agents import LeaveReason
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.options import RendezvousOptions
from tests.simulation import faults

FAULTS_UNTIL = 6.0
"""Seconds."""


def draw(seed: int) -> faults.Schedule:
    """Draw a schedule; the same seed gives the same one."""
    rng = random.Random(seed)
    nodes = rng.randint(1, 8)
    allocation = rng.random() < 0.5
    names = [f"node{number}" for number in rng.sample(range(1, 15), nodes)]
    if allocation:
        names.sort(key=lambda name: int(name[4:]))
    min_nodes = rng.randint(1, max(1, nodes - rng.choice((0, 1, 1, 2))))
    settings = Settings(
        min_nodes=min_nodes,
        max_nodes=rng.randint(min_nodes, nodes + 1),
        max_restarts=rng.choice((0, 1, 3, 100)),
        expected_nodes=tuple(names) if allocation else (),
        first_round=rng.choice((0, 0, 7)),
        join_timeout=20.0,
        last_call_timeout=rng.choice((2.0, 4.0)),
        heartbeat_limit=rng.choice((1.0, 3.0)),
        leave_margin=rng.choice((0.5, 2.0)),
        min_round_time=rng.choice((0.0, 0.0, 1.0)),
    )
    settings = _draw_valid_nodes(seed, settings)
    arrivals = _draw_preparations(seed, _draw_arrivals(rng, names, allocation), allocation=allocation)
    settings, arrivals = _draw_domains(seed, settings, arrivals)
    actions: list[faults.Action] = list(arrivals)
    at = rng.uniform(0.0, FAULTS_UNTIL)
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 12))):
        # Half of what goes wrong does so while something else is being dealt with.
        at = at + rng.expovariate(10.0) if rng.random() < 0.5 else rng.uniform(0.0, FAULTS_UNTIL)
        actions += _draw_fault(rng, at, rng.choice(arrivals), settings)
    if rng.random() < 0.15:
        done = at + rng.uniform(0.0, 2.0)
        actions += [
            faults.Complete(done + rng.expovariate(5.0), arrival.agent, goes=rng.random() < 0.3) for arrival in arrivals
        ]
    noise = rng.choice((faults.CALM, faults.NORMAL, faults.NORMAL, faults.WILD))
    return faults.Schedule(seed, settings, noise, tuple(sorted(actions, key=lambda action: action.at)))


def _draw_valid_nodes(seed: int, settings: Settings) -> Settings:
    """A third of the runs can use some numbers of nodes only."""
    rng = random.Random(f"valid nodes {seed}")
    if rng.random() > 0.33:
        return settings
    unit = rng.choice((2, 2, 3, 4))
    listed = tuple(sorted(rng.sample(range(1, 10), rng.randint(1, 4))))
    options = RendezvousOptions(valid_nodes=rng.choice((range(unit, 100, unit), listed)))
    try:
        least, most = options.node_range(settings.min_nodes, settings.max_nodes)
    except UsageError:
        return settings
    return replace(settings, min_nodes=least, max_nodes=most, valid_nodes=options.valid_nodes)


def _draw_domains(seed: int, settings: Settings, arrivals: list[faults.Arrive]) -> tuple[Settings, list[faults.Arrive]]:
    """A third of the runs have nodes in several failure domains, half of those train in whole segments of them."""
    rng = random.Random(f"domains {seed}")
    if rng.random() > 0.33:
        return settings, arrivals
    domains = [f"s{number}" for number in range(rng.choice((2, 2, 3)))]
    arrivals = [replace(arrival, domain=rng.choice(domains)) for arrival in arrivals]
    options = RendezvousOptions.from_config({"segment": rng.choice((1, 2, 2, 3))})
    if settings.valid_nodes or options.segment == 1:
        return settings, arrivals
    try:
        least, most = options.node_range(settings.min_nodes, settings.max_nodes)
    except UsageError:
        return settings, arrivals
    sizes = {"min_nodes": least, "max_nodes": most, "valid_nodes": options.valid_nodes}
    return replace(settings, **sizes, segment=options.segment), arrivals


def draw_planned(seed: int) -> faults.Schedule:
    """Draw a schedule of leaves with enough time, and of nodes that come; nothing goes wrong."""
    rng = random.Random(seed)
    names = [f"node{number}" for number in range(1, rng.randint(2, 8))]
    settings = Settings(min_nodes=1, max_nodes=len(names), leave_margin=1.0)
    actions: list[faults.Action] = []
    for name in names:
        at = rng.choice((rng.uniform(0.0, 0.05), rng.uniform(0.0, 6.0)))
        for life in range(rng.randint(1, 3)):
            actions.append(faults.Arrive(at, f"{name}/{life}", node=name))
            at += rng.choice((2.0, rng.uniform(0.0, 3.0)))
            actions.append(faults.Leave(at, f"{name}/{life}", rng.uniform(4.0, 8.0)))
            at += rng.uniform(0.0, 2.0)
    if rng.random() < 0.8:
        # Else all go at last.
        actions.append(faults.Arrive(rng.uniform(0.0, 1.0), "node9/0", node="node9"))
    noise = rng.choice((faults.CALM, faults.NORMAL))
    return faults.Schedule(seed, settings, noise, tuple(sorted(actions, key=lambda action: action.at)))


def draw_sizes(seed: int) -> faults.Schedule:
    """Draw a schedule of nodes that come and go, with a script that can use some numbers of nodes only.

    It can use the number that begins. No restart is left, unless workers fail by themselves, too.
    """
    rng = random.Random(f"sizes {seed}")
    nodes = rng.randint(2, 8)
    first = rng.randint(1, nodes)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    unusable = frozenset(size for size in range(1, nodes + 1) if size != first and rng.random() < 0.5)
    fails = rng.random() < 0.2
    settings = Settings(
        min_nodes=rng.choice((1, first)),
        max_nodes=nodes,
        max_restarts=100 if fails else 0,
        expected_nodes=tuple(names[:first]),
        join_timeout=20.0,
        last_call_timeout=2.0,
        leave_margin=1.0,
    )
    part = rng.choice((1.0, 1.0, 0.7, 0.0))
    arrivals = [
        faults.Arrive(
            rng.uniform(0.0, 0.05) if index < first else rng.uniform(3.0, 8.0),
            f"{name}/1",
            node=name,
            position=index,
            takes_part=rng.random() < part,
        )
        for index, name in enumerate(names)
    ]
    actions: list[faults.Action] = list(arrivals)
    for arrival in rng.sample(arrivals, rng.randint(0, nodes - 1)):
        # Later than the first step of the first round.
        at = max(arrival.at, 3.0) + rng.uniform(0.0, 6.0)
        went = (
            faults.Die(at, arrival.agent)
            if rng.random() < 0.5
            else faults.Leave(at, arrival.agent, rng.uniform(2.0, 6.0))
        )
        actions += [went, *_draw_return(rng, arrival, at)]
    if fails:
        actions += [faults.Fail(rng.uniform(3.0, 9.0), rng.choice(names) + "/1") for _ in range(rng.randint(1, 3))]
    noise = rng.choice((faults.CALM, faults.NORMAL))
    return faults.Schedule(seed, settings, noise, tuple(sorted(actions, key=lambda action: action.at)), unusable)


def _draw_arrivals(rng: random.Random, names: list[str], allocation: bool) -> list[faults.Arrive]:
    spread = rng.choice((0.01, 0.3, 5.0))
    workers = rng.choice(((1,), (4,), (1, 2, 8)))
    part = rng.choice((1.0, 1.0, 0.8, 0.0))
    roles = rng.choice((("trainer",), ("trainer",), ("trainer", "evaluator")))
    arrivals = [
        faults.Arrive(
            at=rng.uniform(0.0, spread),
            agent=f"{name}/1",
            node=name,
            position=index if allocation else 0,
            workers=rng.choice(workers),
            role=rng.choice(roles),
            takes_part=rng.random() < part,
        )
        for index, name in enumerate(names)
    ]
    if len(arrivals) > 2 and rng.random() < 0.3:
        # Several come late, together.
        late = rng.uniform(0.5, 4.0)
        for index in rng.sample(range(len(arrivals)), rng.randint(1, len(arrivals) - 1)):
            arrivals[index] = replace(arrivals[index], at=late + rng.uniform(0.0, 0.04))
    if allocation and len(arrivals) > 1 and rng.random() < 0.15:
        arrivals.pop(rng.randrange(len(arrivals)))
    return arrivals


def _draw_preparations(seed: int, arrivals: list[faults.Arrive], *, allocation: bool) -> list[faults.Arrive]:
    """How long each agent takes from its start to its first join, and which were started together."""
    rng = random.Random(f"preparations {seed}")
    longest = rng.choice((0.0, 0.0, 0.3, 2.0))
    size = rng.choice((1, 1, 2, 3))
    cohorts = [f"{index // size}" for index in range(len(arrivals))] if not allocation else ["0"] * len(arrivals)
    # Some are started that never become agents.
    strays = rng.choice((0, 0, 0, 1))
    sizes = {cohort: cohorts.count(cohort) + strays for cohort in cohorts}
    return [
        replace(arrival, seconds=rng.uniform(0.0, longest), cohort=(cohort, sizes[cohort]))
        for arrival, cohort in zip(arrivals, cohorts, strict=True)
    ]


_WEIGHTS = {
    "die": 5, "leave": 4, "fail": 4, "break": 5, "cut": 2, "hang": 2, "stall": 2, "ledger": 1, "slurm": 1,
    "complete": 1.5, "close": 0.2,
}  # fmt: skip


def _draw_fault(rng: random.Random, at: float, arrival: faults.Arrive, settings: Settings) -> list[faults.Action]:
    agent = arrival.agent
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    limit = settings.heartbeat_limit
    match kind:
        case "die":
            how = rng.choice(("killed", "power", "ragged", "fading"))
            seconds = rng.uniform(0.0, 0.03) if how in ("ragged", "fading") else 0.0
            return [faults.Die(at, agent, seconds, how), *_draw_return(rng, arrival, at)]
        case "leave":
            reason = rng.choice((LeaveReason.PREEMPTED, LeaveReason.TIME_LIMIT, LeaveReason.DRAINED))
            seconds = rng.choice((0.0, rng.uniform(0.05, 2.0), rng.uniform(2.0, 8.0)))
            return [faults.Leave(at, agent, seconds, reason), *_draw_return(rng, arrival, at)]
        case "fail":
            return [faults.Fail(at, agent)]
        case "break":
            return [faults.Break(at, agent, noticed=rng.random() < 0.8)]
        case "cut":
            afterwards = rng.choice(("goes on", "breaks", "is replaced"))
            return [faults.Cut(at, agent, rng.uniform(0.1, 2 * limit), afterwards, collectives=rng.random() < 0.3)]
        case "hang":
            return [faults.Hang(at, agent, rng.uniform(0.1, 2 * limit))]
        case "stall":
            seconds = rng.choice((rng.uniform(0.05, 0.6), rng.uniform(0.6, 3.0), 10.0))
            return [faults.StallLeader(at, seconds=seconds, timer_first=rng.random() < 0.5)]
        case "ledger":
            return [faults.SlowLedger(at, seconds=rng.uniform(0.1, 2.0))]
        case "slurm":
            return [faults.SlurmSays(at, agent)]
        case "complete":
            return [faults.Complete(at, agent, goes=rng.random() < 0.5)]
        case _:
            return [faults.Close(at, agent)]


def _draw_return(rng: random.Random, arrival: faults.Arrive, gone_at: float) -> list[faults.Action]:
    """Slurm starts another agent on the node that went."""
    actions: list[faults.Action] = []
    if rng.random() < 0.2:
        actions.append(faults.SlurmSays(gone_at + rng.uniform(0.0, 2.0)))
    if rng.random() < 0.5:
        again = arrival.agent.rsplit("/", 1)[0] + f"/{rng.randint(2, 999)}"
        actions.append(replace(arrival, at=gone_at + rng.uniform(0.0, 3.0), agent=again, cohort=(again, 1)))
    return actions
