"""What a lost node costs a training with a snapshot after every step: steps that are repeated, and seconds.

    python -m benchmarks.lost_steps [--json FILE] [--repetitions 3]

Runs `benchmarks/snapshot_scripts/wide.py` on a real Slurm cluster of four nodes on this machine, one worker per node,
with 256 MiB of state on each: by DistributedDataParallel, where all ranks have all of it, and by FSDP2, where each has
its shards, which agents copy to another node (--snapshot-replicas 1). The fourth node is killed, and one joins three.
The same without snapshots, which begins anew, takes turns. Needs root, for the cluster.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.history import Recovery, Worker, recovery
from benchmarks.job import Job, installed_package, require_root, running_cluster, wait
from benchmarks.launchers import Launcher
from benchmarks.scenarios import Scenario
from benchmarks.tables import Bar, Cell, Results, Table, median, seconds
from tests.cluster.testbed import Cluster, Settings, network

_SCRIPTS = [
    Path(__file__).parent / "snapshot_scripts/wide.py",
    Path(__file__).parent / "framework_scripts/marks.py",
]
_KINDS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}
_SCENARIOS = (Scenario.KILLED, Scenario.JOINS)
_SETTLE = 10.0
"""Seconds of training before anything happens: some snapshots are safe by then."""
_LIMIT = 120.0


@dataclass(frozen=True, slots=True)
class _Loss:
    """What one event cost.

    Attributes:
        recovery: steps and seconds.
        copy: steps from the one that was taken to the one at which it was safe; None if none was.
        between: from one safe step to the next.
    """

    recovery: Recovery
    copy: float | None
    between: float | None


def main() -> int:
    """Measure, show and judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lost_steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="of which medians are taken")
    parser.add_argument("--name", default="lost-steps", help="of the test cluster")
    options = parser.parse_args()
    require_root()
    results = Results.of("lost_steps")
    found: dict[tuple[str, Scenario, bool], list[_Loss | None]] = defaultdict(list)
    with installed_package() as package, running_cluster(Settings(options.name)) as cluster:
        for number in range(options.repetitions):
            for kind in _KINDS:
                for scenario in _SCENARIOS:
                    for snapshots in (False, True):
                        one = _lose(cluster, package, kind, scenario, snapshots=snapshots)
                        found[kind, scenario, snapshots].append(one)
                        what = "every step" if snapshots else "no snapshots"
                        print(f"{number + 1}: {kind}, {scenario.value}, {what}: {one}", flush=True)
    _show(results, found, options.repetitions)
    return results.finish(options.json)


def _lose(cluster: Cluster, package: Path, kind: str, scenario: Scenario, *, snapshots: bool) -> _Loss | None:
    words = [kind, "--snapshots"] if snapshots else [kind]
    replicas = ["--snapshot-replicas=1"] if kind == "fsdp2" else []
    with Job(cluster, Launcher.OURS, "warm", package, scripts=_SCRIPTS, options=replicas, arguments=words) as job:
        job.start(scenario.nodes_before)
        job.wait_training(len(scenario.nodes_before))
        with _safe_steps(cluster, job) as safe:
            time.sleep(_SETTLE)
            event = scenario.happen(cluster, job)
            wait(lambda: recovery(job.workers(), event, scenario.nodes_after) is not None, _LIMIT)
            workers = job.workers()
        found = recovery(workers, event, scenario.nodes_after)
        if found is None:
            return None
        return _Loss(found, *_copies(workers, [each for each in safe if each[0] < event]))


@contextmanager
def _safe_steps(cluster: Cluster, job: Job) -> Iterator[list[tuple[float, int]]]:
    """When which step became safe, as the agent of the first node says; filled at the end."""
    found: list[tuple[float, int]] = []
    file = next(job.directory.glob("*/*/health/n1.*.json"))
    target = json.loads(file.read_text())[0]["targets"][0]
    namespace = network.NAMESPACES / cluster.settings.namespace("n1")
    program = [sys.executable, "-m", "benchmarks.safe_steps", target]
    with subprocess.Popen(["nsenter", f"--net={namespace}", *program], stdout=subprocess.PIPE, text=True) as asking:
        try:
            yield found
        finally:
            asking.terminate()
            assert asking.stdout is not None
            for line in asking.stdout:
                moment, step = line.split()
                found.append((float(moment), int(step)))


def _copies(workers: Sequence[Worker], safe: Sequence[tuple[float, int]]) -> tuple[float | None, float | None]:
    """How many steps a copy takes, and how many there are from one that is safe to the next: medians."""

    def reached(moment: float) -> int:
        return max(
            number
            for worker in workers
            for at, number in zip(worker.steps, worker.numbers, strict=True)
            if at <= moment
        )

    # The first is from before: when it became safe is not known.
    copies = [float(reached(moment) - step) for moment, step in safe[1:]]
    between = [float(later - earlier) for (_, earlier), (_, later) in pairwise(safe)]
    return median(copies), median(between)


def _show(results: Results, found: dict[tuple[str, Scenario, bool], list[_Loss | None]], times: int) -> None:
    table = Table(
        "Four nodes with 256 MiB of state each, a snapshot after every step: what an event costs",
        ["training", "event", "steps repeated", "most", "a copy", "safe every", "gap", "without snapshots"],
        note=f"Medians of {times}. A copy: steps from the one that is copied to other nodes until it is safe. Safe "
        "every: steps from one that is safe to the next. Gap: seconds between two training steps; without snapshots "
        "the same training loads nothing and begins anew.",
    )
    for kind, name in _KINDS.items():
        for scenario in _SCENARIOS:
            ours, plain = found[kind, scenario, True], found[kind, scenario, False]
            lost = [None if one is None else float(one.recovery.lost) for one in ours]
            most = None if None in lost else max(each for each in lost if each is not None)
            copy = median(None if one is None else one.copy for one in ours)
            between = median(None if one is None else one.between for one in ours)
            gap, without = (median(None if one is None else one.recovery.gap for one in each) for each in (ours, plain))
            cells: list[Cell] = [_steps(median(lost)), _steps(most), *map(_steps, (copy, between))]
            table.rows.append([name, scenario.value, *cells, seconds(gap), seconds(without)])
            allowed = 1 + (copy or 0.0) if kind == "fsdp2" else 1.0
            text = "1 step and those of a copy" if kind == "fsdp2" else "1 step"
            results.bars.append(
                Bar.at_most(f"{name}, {scenario.value}: at most {text} repeated", most, allowed, "steps")
            )
            more = None if gap is None or without is None else gap - without
            results.bars.append(Bar.at_most(f"{name}, {scenario.value}: at most 0.3 s more gap", more, 0.3))
    results.add(table)


def _steps(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
