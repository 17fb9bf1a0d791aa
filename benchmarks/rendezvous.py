"""How long agents need to agree who is in a round.

    python -m benchmarks.rendezvous [--json FILE] [--repetitions 5] [--only ours,scale,disturbed,torch,queue,churn]

The leader runs in one process, the agents in another: real connections, real sealed messages, rounds written to a run
directory; only workers are missing. torch's dynamic rendezvous over c10d runs in the same harness: its store in one
process, its agents as threads of another. Both have a network namespace of their own when root runs this, so that no
name server takes part.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from benchmarks import disturbed, sandbox, scale
from benchmarks.agents import Crowd
from benchmarks.leading import GIVEN_LIMITS, LeaderProcess
from benchmarks.tables import Bar, Results, Table, median, seconds
from benchmarks.usage import Usage, usage

_SIZES = (64, 128, 256, 1024)
_MANY = 16384
_FIRST_ROUND = {1024: 0.5, 4096: 2.0, 16384: 10.0}
"""Seconds in which that many agents are to hold their rank."""
_TORCH_SIZES = (64, 128)
_CHURN_SIZE, _CHURN_ROUNDS = 256, 50


def main() -> int:
    """Measure, show and judge."""
    options = _options()
    sandbox.enter("benchmarks.rendezvous")
    sandbox.raise_descriptor_limit()
    results = Results.of("rendezvous")
    repetitions, only = options.repetitions, set(options.only.split(","))
    ours: dict[int, float | None] = {}
    if "ours" in only:
        ours = _ours(results, options.sizes, repetitions, many=options.many)
    if "scale" in only:
        scale.measure(results, options.scale)
    if "disturbed" in only:
        disturbed.measure(results, options.disturbed)
    if "queue" in only:
        _queue(results, options.sizes, repetitions)
    if "torch" in only:
        _torch(results, ours, repetitions, options.limit)
    if "churn" in only:
        _churn(results)
    return results.finish(options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rendezvous", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of which medians are taken")
    parser.add_argument("--only", default="ours,scale,disturbed,queue,torch,churn", help="the parts to run")
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds for one rendezvous of torch")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(_SIZES))
    parser.add_argument(
        "--scale", type=lambda text: [int(size) for size in text.split(",")], default=[1024, 4096, 16384]
    )
    parser.add_argument("--disturbed", type=lambda text: [int(size) for size in text.split(",")], default=[1024])
    parser.add_argument("--many", type=int, default=_MANY, metavar="N", help="agents of the single large rendezvous")
    return parser.parse_args()


def _ours(results: Results, sizes: list[int], repetitions: int, many: int) -> dict[int, float | None]:
    table = Table(
        "Time until all agents hold their rank (s)",
        ["agents", "from connecting", "longest", "from joining", "longest", "leader resident MiB", "share MiB"],
        note="From connecting: every agent starts to connect at once. From joining: all were connected before. "
        f"Medians of {repetitions}; {many} agents once. The leader begins with a limit of {GIVEN_LIMITS[0]} open files "
        f"and raises it itself to {GIVEN_LIMITS[1]}; the process that plays all agents is given all that there are.",
    )
    whole: dict[int, float | None] = {}
    joins: dict[int, float | None] = {}
    for size in [*sizes, many]:
        runs = [asyncio.run(_gather(size)) for _ in range(1 if size == many else repetitions)]
        connecting, joining = [run[0] for run in runs], [run[1] for run in runs]
        whole[size], joins[size] = median(connecting), median(joining)
        table.rows.append(
            [
                size,
                seconds(whole[size], 3),
                seconds(max(connecting), 3),
                seconds(joins[size], 3),
                seconds(max(joining), 3),
                f"{max(run[2].resident for run in runs):.0f}",
                f"{max(run[2].share for run in runs):.0f}",
            ]
        )
    results.add(table)
    for size, most in _FIRST_ROUND.items():
        if size in whole:
            results.bars.append(Bar.at_most(f"{size:,} agents that connect at once hold their rank", whole[size], most))
    small, large = whole.get(256), whole.get(1024)
    if small and large:
        results.bars.append(Bar.at_most("256 to 1,024 agents: at most 5 times", large / small, 5, "times"))
    return joins


async def _gather(size: int) -> tuple[float, float, Usage]:
    return await _connecting(size), *await _joining(size)


async def _connecting(size: int) -> float:
    with LeaderProcess(size, size) as leader:
        crowd = Crowd(leader)
        agents = [crowd.add(index) for index in range(size)]
        begin = asyncio.get_running_loop().time()
        for agent in agents:
            agent.connect()
            agent.join()
        taken = await crowd.next_round(size) - begin
        await crowd.close()
        return taken


async def _joining(size: int) -> tuple[float, Usage]:
    with LeaderProcess(size, size) as leader:
        crowd = Crowd(leader)
        for index in range(size):
            crowd.add(index).connect()
        await asyncio.to_thread(leader.wait_connected, size)
        begin = asyncio.get_running_loop().time()
        for agent in crowd.agents.values():
            agent.join()
        taken = await crowd.next_round(size) - begin
        used = leader.usage()
        await crowd.close()
        return taken, used


def _queue(results: Results, sizes: list[int], repetitions: int) -> None:
    # Not at the top: what this module imports, the leader's process imports too (multiprocessing, spawn).
    from benchmarks import torch_queue

    table = Table(
        "For comparison: the same exchange by TCPStore queues (s)",
        ["agents", "from connecting", "from joining"],
        note="One queue_push per agent, one answer popped. It does not know who speaks, does not notice who is gone, "
        f"and nobody connects to it while a name server is slow. Medians of {repetitions}.",
    )
    for size in sizes:
        runs = [torch_queue.gather(size) for _ in range(repetitions)]
        table.rows.append([size, *(seconds(median(run[part] for run in runs), 3) for part in (0, 1))])
    results.add(table)


def _torch(results: Results, ours: dict[int, float | None], repetitions: int, limit: float) -> None:
    from benchmarks import torch_dynamic

    table = Table(
        "Beside torch's dynamic rendezvous over c10d (s)",
        ["agents", "torch", "longest", "ours", "times faster"],
        note="min = max = agents. On both sides the connections stand before the clock starts. "
        f"Medians of {repetitions}; never: not done after {limit:.0f} s.",
    )
    for size in _TORCH_SIZES:
        runs = [torch_dynamic.gather(size, limit) for _ in range(repetitions)]
        longest = None if None in runs else max(run for run in runs if run is not None)
        own, other = ours.get(size), median(runs)
        times = f"{other / own:.0f}" if own and other else None
        table.rows.append([size, seconds(other), seconds(longest), seconds(own, 3) if own else None, times])
        if size == max(_TORCH_SIZES):
            _compare(results, size, own, other)
    results.add(table)


def _churn(results: Results) -> None:
    table = Table(
        f"{_CHURN_ROUNDS} joins and {_CHURN_ROUNDS} leaves in a row at {_CHURN_SIZE} agents (s)",
        ["change", "median", "longest"],
        note="From the leave, or from the start of the new agent, until every agent holds its rank in the new round.",
    )
    leaves, joins, before, after = asyncio.run(_rounds())
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


async def _rounds() -> tuple[list[float], list[float], dict[str, Usage], dict[str, Usage]]:
    clock = asyncio.get_running_loop().time
    leaves, joins = [], []
    size = _CHURN_SIZE
    with LeaderProcess(size, size - 1) as leader:
        crowd = Crowd(leader)
        for index in range(size):
            agent = crowd.add(index)
            agent.connect()
            agent.join()
        await crowd.next_round(size)
        before: dict[str, Usage] = {}
        for number in range(_CHURN_ROUNDS):
            index = number * 37 % size
            begin = clock()
            leaving = asyncio.create_task(crowd.agents.pop(index).leave())
            leaves.append(await crowd.next_round(size - 1) - begin)
            await leaving
            begin = clock()
            agent = crowd.add(index)
            agent.connect()
            agent.join()
            joins.append(await crowd.next_round(size) - begin)
            if number == 4:
                before = {"leader": leader.usage(), f"{size} agents": usage()}
        after = {"leader": leader.usage(), f"{size} agents": usage()}
        await crowd.close()
    return leaves, joins, before, after


def _compare(results: Results, size: int, ours: float | None, torch: float | None) -> None:
    promise = f"{size} agents: 200 times faster than torch"
    if ours and torch:
        results.bars.append(Bar.at_least(promise, torch / ours, 200))
    elif ours:
        results.bars.append(Bar(promise, "torch never", True))


if __name__ == "__main__":
    sys.exit(main())
