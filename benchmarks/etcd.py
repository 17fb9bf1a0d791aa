"""A run whose records are in etcd.

    python -m benchmarks.etcd [--json FILE] [--repetitions 5]

As benchmarks.rendezvous, with a private etcd beside; and what agents that have nothing to do ask of it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks import sandbox
from benchmarks.etcd_load import SETTLING, Newcomers, followed_after, requests_by_phase, steady_rate
from benchmarks.leading import COORDINATOR, INCARNATION, LIMIT, running
from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table, median, seconds
from slurm_elastic.rundir import RunDir
from slurm_elastic.torchelastic import EtcdClient, EtcdServer

_SIZE, _THREADS = 1024, 32
_IDLE_AGENTS, _IDLE_SECONDS = 32, 30.0
_COUNTED = (3, 6)
"""Agents of the runs whose requests are counted."""


def main() -> int:
    """Measure, show and judge."""
    options = make_parser("etcd", repetitions=5).parse_args()
    sandbox.enter("benchmarks.etcd")
    sandbox.raise_descriptor_limit()
    results = Results.of("etcd")
    _measure(results, options.repetitions)
    return results.finish(options.json)


def _measure(results: Results, repetitions: int) -> None:
    with EtcdServer() as etcd:
        table = Table(
            "Time until all agents hold their rank, with the run's records in a local etcd (s)",
            ["agents", "from connecting", "longest"],
            note="Every agent starts to connect at once: it asks etcd for all that it has of the run, finds the leader "
            f"there, and joins; the round is written to etcd. Medians of {repetitions}.",
        )
        taken = [_over_etcd(etcd, _SIZE) for _ in range(repetitions)]
        table.rows.append([_SIZE, seconds(median(taken), 3), seconds(max(taken), 3)])
        results.add(table)
        with tempfile.TemporaryDirectory() as directory:
            run_dir = RunDir.for_run(Path(directory), "idle").open()
            rate = steady_rate(etcd, run_dir, "idle.0", _IDLE_AGENTS, _IDLE_SECONDS)
        followed = [followed_after(etcd) for _ in range(repetitions)]
        counted = {size: requests_by_phase(etcd, size) for size in _COUNTED}
    silent = Table(
        "A leader falls silent and its connections stand (s)",
        ["agents", "until the next round", "longest"],
        note=f"Real agents without a training; the leader's stands still. Medians of {repetitions}.",
    )
    silent.rows.append([3, seconds(median(followed)), seconds(max(followed))])
    results.add(silent)
    idle = Table(
        "What an idle run asks of etcd",
        ["agents", "requests per agent and second"],
        note=f"By etcd's own count, over {_IDLE_SECONDS:g} s: all renew the run's lease.",
    )
    idle.rows.append([_IDLE_AGENTS, f"{rate:.3f}"])
    results.add(idle)
    phases = Table(
        "What a start, a change and an end ask of etcd, all agents together",
        ["agents", *counted[_COUNTED[0]]],
        note="Requests by etcd's own count, a stream counts once; real agents with a worker each. Start and change "
        f"include {SETTLING:g} s in which nothing happens. Change: an agent that does not lead is killed.",
    )
    phases.rows += [[size, *(f"{count:.0f}" for count in of.values())] for size, of in counted.items()]
    results.add(phases)
    few, many = (counted[size] for size in _COUNTED)
    for phase in many:
        promise = f"{phase}: times as many requests for {_COUNTED[1]} agents as for {_COUNTED[0]}"
        results.bars.append(Bar.at_most(promise, many[phase] / few[phase], _COUNTED[1] / _COUNTED[0], "times"))
    results.bars.append(Bar.at_most("1,024 agents hold their rank over etcd in 4 s", median(taken), 4))
    results.bars.append(Bar.at_most("a silent leader is followed in 6 s", median(followed), 6))
    results.bars.append(Bar.at_most("at most 1 request to etcd per agent and second", rate, 1, "requests"))


def _over_etcd(etcd: EtcdServer, size: int) -> float:
    with (
        running(size, COORDINATOR, etcd=str(etcd.config)) as (herd, (leader,)),
        Newcomers(etcd, leader.run_dir, INCARNATION) as newcomers,
        # In a run every agent has a process of its own.
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        begin = time.monotonic()
        asked = {threads.submit(newcomers.ask, index): index for index in range(size)}
        for each in as_completed(asked):
            if each.result() != leader.port:
                raise RuntimeError("the leader's place is not in etcd")
            herd.add([asked[each]])
            herd.follow(0.0)
        herd.wait(herd.hold_places(size, -1), LIMIT)
        taken = herd.placed_at - begin
    with EtcdClient(etcd.config) as client:
        client.delete(etcd.config.run_prefix(leader.run_dir.run_id), prefix=True)
    return taken


if __name__ == "__main__":
    sys.exit(main())
