"""How long training stands still when nodes come and go: torchrun's defaults, torchrun tuned by hand, slurm-elastic.

    python -m benchmarks.recovery [--json FILE] [--repetitions 5] [--scenarios killed,silent,leaves,joins]
                                  [--beside killed,joins] [--beside-repetitions 2]

Runs the same script on a real Slurm cluster of four nodes on this machine, one worker per node, 50 ms steps with an
all-reduce over gloo, and lets things happen to the fourth node. The launchers take turns, torchrun in the scenarios of
`--beside` only, and fewer of them: there its time is compared, and with its defaults it needs most of a minute, if it
comes back at all. About 12 minutes in all. Needs root, for the cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks import idle
from benchmarks.history import Recovery
from benchmarks.job import Job, installed_package, require_root, running_cluster
from benchmarks.launchers import Launcher
from benchmarks.options import add_parts, make_parser
from benchmarks.scenarios import Scenario
from benchmarks.tables import Bar, Cell, Results, Table, longest, median, seconds
from tests.cluster.testbed import Cluster, Settings

_SETTLE = 5.0
"""Seconds of training before anything happens: the state that a long training is in."""
_TABLE_LIMITS = {Scenario.KILLED: 0.7, Scenario.SILENT: 3.5, Scenario.LEAVES: 0.2, Scenario.JOINS: 0.2}
_SCENARIOS = [scenario.name.lower() for scenario in _TABLE_LIMITS]
_GAP_LIMITS = {Scenario.KILLED: 1.2, Scenario.JOINS: 1.2}
"""With warm workers, and the least that torchrun's gap has to be above ours when a node is killed."""
_TIMES_BETTER = {Launcher.DEFAULTS: 25, Launcher.TUNED: 4}

Found = dict[tuple[Scenario, Launcher], list[Recovery | None]]


def main() -> int:
    """Measure, show and judge."""
    options = _options()
    require_root()
    results = Results.of("recovery")
    with installed_package() as package, running_cluster(Settings("benchmark")) as cluster:
        found = _recoveries(cluster, package, options)
        _show(results, found, options)
        if options.idle:
            idles = {
                launcher: idle.measure(cluster, launcher, package, options.idle)
                for launcher in map(_launcher, options.launchers)
            }
            idle.judge(results, idles, options.idle)
    return results.finish(options.json)


def _options() -> argparse.Namespace:
    parser = make_parser("recovery", repetitions=5)
    parser.add_argument("--limit", type=float, default=75.0, metavar="S", help="seconds after which it is never")
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="seconds to watch idle agents; 0: not")
    add_parts(parser, *(launcher.name.lower() for launcher in Launcher), option="--launchers")
    add_parts(parser, *_SCENARIOS, option="--scenarios")
    add_parts(parser, *_SCENARIOS, option="--beside", default=["killed", "joins"])
    parser.add_argument("--beside-repetitions", type=int, default=2, metavar="N", help="of torchrun's; default: 2")
    return parser.parse_args()


def _launcher(name: str) -> Launcher:
    return Launcher[name.upper()]


def _recoveries(cluster: Cluster, package: Path, options: argparse.Namespace) -> Found:
    found: Found = defaultdict(list)
    for number in range(max(options.repetitions, options.beside_repetitions)):
        for name in options.scenarios:
            scenario = Scenario[name.upper()]
            for launcher in map(_launcher, options.launchers):
                if launcher is not Launcher.OURS and name not in options.beside:
                    continue
                repetitions = options.repetitions if launcher is Launcher.OURS else options.beside_repetitions
                if number >= repetitions or _median_is_never(found[scenario, launcher], repetitions):
                    continue
                with Job(cluster, launcher, package) as job:
                    job.train(scenario.nodes_before, _SETTLE)
                    _, one = scenario.recover(cluster, job, options.limit)
                found[scenario, launcher].append(one)
                shown = f"table {one.table:.3f} s, gap {one.gap:.2f} s" if one else f"never ({options.limit:.0f} s)"
                print(f"{number + 1}: {scenario.value}, {launcher.value}: {shown}", flush=True)
    return found


def _median_is_never(runs: list[Recovery | None], repetitions: int) -> bool:
    """Whether most repetitions are over without recovery, so that the others cannot change the median."""
    return runs.count(None) > repetitions / 2


def _show(results: Results, found: Found, options: argparse.Namespace) -> None:
    table = Table(
        "Seconds from an event on the fourth node to the next round, and without a training step",
        ["event", "launcher", "times", "new table", "longest", "gap", "longest"],
        note="New table: until the last node has started its worker in the new round, from the kill, the cut, the "
        "signal to the agent, or the new agent's first connection. Gap: between two training steps, so with the start "
        "of the workers (warm). Medians over the number of times; of two the better one. Never: not within "
        f"{options.limit:.0f} s in most of them, after which the launcher was not run again.",
    )
    gaps: dict[tuple[Scenario, Launcher], float | None] = {}
    for (scenario, launcher), runs in found.items():
        tables = [None if run is None else run.table for run in runs]
        whole = [None if run is None else run.gap for run in runs]
        gaps[scenario, launcher] = _median(whole)
        cells: list[Cell] = [scenario.value, launcher.value, len(runs)]
        for values in (tables, whole):
            cells += [seconds(_median(values)), seconds(longest(values))]
        table.rows.append(cells)
        if launcher is Launcher.OURS:
            limit = _TABLE_LIMITS[scenario]
            results.bars.append(Bar.at_most(f"{scenario.value}: new table in {limit} s", _median(tables), limit))
    results.add(table)
    _judge_gaps(results, gaps, options.limit)


def _judge_gaps(results: Results, gaps: dict[tuple[Scenario, Launcher], float | None], limit: float) -> None:
    for scenario, most in _GAP_LIMITS.items():
        if (scenario, Launcher.OURS) in gaps:
            own = gaps[scenario, Launcher.OURS]
            results.bars.append(Bar.at_most(f"{scenario.value}: gap of at most {most} s", own, most))
    own = gaps.get((Scenario.KILLED, Launcher.OURS))
    for launcher, times in _TIMES_BETTER.items():
        if own is None or (Scenario.KILLED, launcher) not in gaps:
            continue
        other, promise = (
            gaps[Scenario.KILLED, launcher],
            f"node killed: gap {times} times shorter than {launcher.value}",
        )
        if other is None:
            results.bars.append(Bar(promise, "torchrun never", limit / own >= times))
        else:
            results.bars.append(Bar.at_least(promise, other / own, times))


def _median(values: list[float | None]) -> float | None:
    """Of an even number the worst does not count: torchrun, which is run less often, is not made worse than it is."""
    ordered = sorted(values, key=lambda value: float("inf") if value is None else value)
    return median(ordered if len(ordered) % 2 else ordered[:-1])


if __name__ == "__main__":
    sys.exit(main())
