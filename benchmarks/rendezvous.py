"""How long agents need to agree who is in a round.

    python -m benchmarks.rendezvous [--json FILE] [--repetitions 5] [--only ours,scale,disturbed,torch,churn]

The leader runs in one process, the agents in others: real connections, real sealed messages, rounds written to a run
directory; only workers are missing. torch's dynamic rendezvous over c10d runs in the same harness: its store in one
process, its agents as threads of another. Both have a network namespace of their own when root runs this, so that no
name server takes part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from benchmarks import disturbed, sandbox, scale
from benchmarks.leading import COORDINATOR, GIVEN_LIMITS, LIMIT, running
from benchmarks.options import add_parts, add_sizes, make_parser
from benchmarks.tables import Bar, Results, Table, longest, median, seconds
from benchmarks.usage import Usage

_SIZES = (64, 128, 256, 1024)
_MANY = 16384
_FIRST_ROUND = {1024: 0.5, 4096: 2.0, 16384: 10.0}
"""Seconds in which that many agents are to hold their rank."""
_TORCH_SIZES = (64, 128)
_CHURN_SIZE, _CHURN_ROUNDS = 256, 50


def main() -> int:
    """Measure, show and judge."""
    parser = make_parser("rendezvous", repetitions=5)
    add_parts(parser, "ours", "scale", "disturbed", "torch", "churn")
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds for one rendezvous of torch")
    add_sizes(parser, "--sizes", *_SIZES)
    add_sizes(parser, "--scale", 1024, 4096, 16384)
    add_sizes(parser, "--disturbed", 1024)
    parser.add_argument("--many", type=int, default=_MANY, metavar="N", help="agents of the single large rendezvous")
    options = parser.parse_args()
    sandbox.enter("benchmarks.rendezvous")
    sandbox.raise_descriptor_limit()
    results = Results.of("rendezvous")
    ours: dict[int, float | None] = {}
    if "ours" in options.only:
        ours = _ours(results, options.sizes, options.repetitions, many=options.many)
    if "scale" in options.only:
        scale.measure(results, options.scale)
    if "disturbed" in options.only:
        disturbed.measure(results, options.disturbed)
    if "torch" in options.only:
        _torch(results, ours, options.repetitions, options.limit)
    if "churn" in options.only:
        _churn(results)
    return results.finish(options.json)


def _ours(results: Results, sizes: list[int], repetitions: int, many: int) -> dict[int, float | None]:
    table = Table(
        "Time until all agents hold their rank (s)",
        ["agents", "from connecting", "longest", "from joining", "longest", "leader resident MiB", "share MiB"],
        note="From connecting: every agent starts to connect at once. From joining: all were connected before. "
        f"Medians of {repetitions}; {many} agents once. The leader begins with a limit of {GIVEN_LIMITS[0]} open files "
        f"and raises it itself to {GIVEN_LIMITS[1]}; processes that play the agents are given all that there are.",
    )
    whole: dict[int, float | None] = {}
    joins: dict[int, float | None] = {}
    for size in [*sizes, many]:
        runs = [_gather(size) for _ in range(1 if size == many else repetitions)]
        connecting, joining, used = zip(*runs, strict=True)
        whole[size], joins[size] = median(connecting), median(joining)
        times = (whole[size], max(connecting), joins[size], max(joining))
        memory = (max(each.resident for each in used), max(each.share for each in used))
        table.rows.append([size, *(seconds(each, 3) for each in times), *(f"{each:.0f}" for each in memory)])
    results.add(table)
    for size, most in _FIRST_ROUND.items():
        if size in whole:
            results.bars.append(Bar.at_most(f"{size:,} agents that connect at once hold their rank", whole[size], most))
    small, large = whole.get(256), whole.get(1024)
    if small and large:
        results.bars.append(Bar.at_most("256 to 1,024 agents: at most 5 times", large / small, 5, "times"))
    return joins


def _gather(size: int) -> tuple[float, float, Usage]:
    """Seconds from connecting and from joining until all agents hold their rank, and what the leader uses then."""
    agents = range(size)
    with running(size, COORDINATOR) as (herd, _):
        begin = time.monotonic()
        herd.add(agents)
        herd.wait(herd.hold_places(size, -1), LIMIT)
        connecting = herd.placed_at - begin
    with running(size, COORDINATOR) as (herd, (leader,)):
        herd.connect(agents)
        herd.wait(herd.connected(size), LIMIT)
        begin = time.monotonic()
        herd.join(agents)
        herd.wait(herd.hold_places(size, -1), LIMIT)
        return connecting, herd.placed_at - begin, leader.usage()


def _torch(results: Results, ours: dict[int, float | None], repetitions: int, limit: float) -> None:
    # Not at the top: what this module imports, the leader's process imports too (multiprocessing, spawn).
    from benchmarks import torch_dynamic

    table = Table(
        "Beside torch's dynamic rendezvous over c10d (s)",
        ["agents", "torch", "longest", "ours", "times faster"],
        note="min = max = agents. On both sides the connections stand before the clock starts. "
        f"Medians of {repetitions}; never: not done after {limit:.0f} s.",
    )
    for size in _TORCH_SIZES:
        runs = [torch_dynamic.gather(size, limit) for _ in range(repetitions)]
        own, other = ours.get(size), median(runs)
        times = f"{other / own:.0f}" if own and other else None
        table.rows.append([size, seconds(other), seconds(longest(runs)), seconds(own, 3) if own else None, times])
        if size == max(_TORCH_SIZES):
            _compare(results, size, own, other)
    results.add(table)


def _churn(results: Results) -> None:
    table = Table(
        f"{_CHURN_ROUNDS} joins and {_CHURN_ROUNDS} leaves in a row at {_CHURN_SIZE} agents (s)",
        ["change", "median", "longest"],
        note="From the leave, or from the start of the new agent, until every agent holds its rank in the new round.",
    )
    leaves, joins, before, after = _rounds()
    for name, taken in (("leave", leaves), ("join", joins)):
        table.rows.append([name, seconds(median(taken), 3), seconds(max(taken), 3)])
    results.add(table)
    used = Table(
        "What the processes use after 5 and after all of these rounds",
        ["process", "moment", "resident MiB", "descriptors", "threads"],
    )
    for process in before:
        for moment, usages in (("after 5", before), ("at the end", after)):
            one = usages[process]
            used.rows.append([process, moment, f"{one.resident:.1f}", one.descriptors, one.threads])
    results.add(used)
    results.bars.append(Bar.at_most(f"every round at {_CHURN_SIZE} agents in 0.5 s", max(leaves + joins), 0.5))
    leaked = max(after[name].descriptors - before[name].descriptors for name in before)
    threads = max(after[name].threads - before[name].threads for name in before)
    grown = max(after[name].resident - before[name].resident for name in before)
    results.bars.append(Bar.at_most("no descriptors left over by rounds", leaked, 0, ""))
    results.bars.append(Bar.at_most("no threads left over by rounds", threads, 0, ""))
    results.bars.append(Bar.at_most("at most 8 MiB more after all rounds", grown, 8, "MiB"))


def _rounds() -> tuple[list[float], list[float], dict[str, Usage], dict[str, Usage]]:
    leaves, joins = [], []
    size = _CHURN_SIZE
    with running(size, COORDINATOR) as (herd, (leader,)):

        def change(work: Callable[[list[int]], None], agents: list[int], left: int) -> float:
            done, begin = herd.hold_places(left, herd.newest), time.monotonic()
            work(agents)
            herd.wait(done, LIMIT)
            return herd.placed_at - begin

        def used() -> dict[str, Usage]:
            return {"leader": leader.usage(), f"{size} agents": herd.usage()}

        change(herd.add, [*range(size)], size)
        before: dict[str, Usage] = {}
        for number in range(_CHURN_ROUNDS):
            index = number * 37 % size
            leaves.append(change(herd.leave, [index], size - 1))
            joins.append(change(herd.add, [index], size))
            if number == 4:
                before = used()
        return leaves, joins, before, used()


def _compare(results: Results, size: int, ours: float | None, torch: float | None) -> None:
    promise = f"{size} agents: 200 times faster than torch"
    if ours and torch:
        results.bars.append(Bar.at_least(promise, torch / ours, 200))
    elif ours:
        results.bars.append(Bar(promise, "torch never", True))


if __name__ == "__main__":
    sys.exit(main())
