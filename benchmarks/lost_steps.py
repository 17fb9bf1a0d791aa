"""What a lost node costs a training with a snapshot after every step: steps that are repeated, and seconds.

    python -m benchmarks.lost_steps [--json FILE] [--repetitions 3] [--torchrun 1] [--only ddp,fsdp2,transformers,...]
                                    [--events killed,joins,leaves,requeued]

On a real Slurm cluster of four nodes on this machine, one worker per node. The fourth node is killed, one joins three,
the fourth is told to go, as by a preemption, or Slurm requeues the job. Needs root, for the cluster.

`ddp` and `fsdp2` run `benchmarks/scripts/wide.py` with 256 MiB of state on each node: by
DistributedDataParallel, where all ranks have all of it, and by FSDP2, where each has its shards, which agents copy to
another node (--snapshot-replicas 1), and on disk when the job is requeued. The same without snapshots, which begins
anew, takes turns.

The others run scripts of frameworks with the lines of docs/howto/frameworks.md, and as their users write them
under torchrun tuned by hand, with the framework's own checkpoint every 20 steps. `transformers-wide` and
`lightning-wide` have 256 MiB of state, and take turns with the same scripts without it if those are chosen, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.history import Recovery, Worker
from benchmarks.job import Job, installed_package, require_root, running_cluster
from benchmarks.launchers import FRAMEWORKS_PYTHON, PYTHON, Launcher
from benchmarks.options import add_parts, make_parser
from benchmarks.scenarios import Scenario
from benchmarks.tables import Bar, Cell, Results, Table, longest, median, seconds
from tests.cluster.testbed import Cluster, Settings, network


@dataclass(frozen=True, slots=True)
class _Kind:
    """One training.

    Attributes:
        name: for readers.
        script: of `scripts`.
        words: its arguments.
    """

    name: str
    script: str
    words: tuple[str, ...] = ()

    @property
    def is_framework(self) -> bool:
        return self.script != "wide.py"


_KINDS = {
    "ddp": _Kind("DistributedDataParallel", "wide.py", ("ddp",)),
    "fsdp2": _Kind("FSDP2", "wide.py", ("fsdp2",)),
    "transformers": _Kind("Transformers", "transformers_gpt2.py"),
    "transformers-wide": _Kind("Transformers, 256 MiB", "transformers_gpt2.py", ("--mib=256",)),
    "lightning": _Kind("Lightning", "lightning_layers.py"),
    "lightning-wide": _Kind("Lightning, 256 MiB", "lightning_layers.py", ("--mib=256",)),
    "fabric": _Kind("Fabric", "layers_loop.py", ("fabric",)),
    "accelerate": _Kind("Accelerate", "layers_loop.py", ("accelerate",)),
}
_WIDE = {"transformers-wide": "transformers", "lightning-wide": "lightning"}
_EVENTS = ("killed", "joins", "leaves", "requeued")
_SETTLE = 10.0
"""Seconds of training before anything happens: some snapshots are safe by then."""
_SETTLE_FRAMEWORKS = 30.0
"""The same where imports have to be learned, by four nodes that share two cores."""
_LIMIT = 120.0


@dataclass(frozen=True, slots=True)
class _Loss:
    """What one event cost.

    Attributes:
        recovery: steps and seconds.
        copy: steps from the one that was taken to the one at which it was safe; None if none was.
        between: from one safe step to the next.
        first_start: seconds from the model to the first step where there was nothing to load; None if the script does
            not tell.
    """

    recovery: Recovery
    copy: float | None = None
    between: float | None = None
    first_start: float | None = None


_Found = dict[tuple[str, Scenario, bool], list[_Loss | None]]
"""By kind, event, and True with snapshots."""


def main() -> int:
    """Measure, show and judge."""
    parser = make_parser("lost_steps", repetitions=3)
    parser.add_argument("--torchrun", type=int, default=1, metavar="N", help="repetitions of what torchrun runs")
    add_parts(parser, *_KINDS)
    add_parts(parser, *_EVENTS, option="--events")
    options = parser.parse_args()
    require_root()
    results = Results.of("lost_steps")
    found: _Found = defaultdict(list)
    with installed_package() as package, running_cluster(Settings("lost-steps", kill_wait=30)) as cluster:
        for number, name, event, snapshots in _turns(options):
            scenario = Scenario[event.upper()]
            one = _lose(cluster, package, _KINDS[name], scenario, snapshots=snapshots)
            found[name, scenario, snapshots].append(one)
            what = "every step" if snapshots else "torchrun" if _KINDS[name].is_framework else "no snapshots"
            print(f"{number + 1}: {name}, {event}, {what}: {one}", flush=True)
    events = [Scenario[event.upper()] for event in options.events]
    if own := [name for name in options.only if not _KINDS[name].is_framework]:
        _show(results, found, own, events, options.repetitions)
    if frameworks := [name for name in options.only if _KINDS[name].is_framework]:
        _show_frameworks(results, found, frameworks, events, options)
    return results.finish(options.json)


def _turns(options: argparse.Namespace) -> Iterator[tuple[int, str, str, bool]]:
    for number in range(options.repetitions):
        for event in options.events:
            for name in options.only:
                others = options.repetitions if not _KINDS[name].is_framework else options.torchrun
                if number < others and name not in _WIDE:
                    yield number, name, event, False
                yield number, name, event, True


def _lose(cluster: Cluster, package: Path, kind: _Kind, scenario: Scenario, *, snapshots: bool) -> _Loss | None:
    launcher = Launcher.TUNED if kind.is_framework and not snapshots else Launcher.OURS
    takes = "--elastic" if kind.is_framework else "--snapshots"
    is_sharded = kind is _KINDS["fsdp2"]
    # Memory ends with the job.
    taken = [takes, *(["--to-disk"] if scenario is Scenario.REQUEUED and not kind.is_framework else [])]
    with Job(
        cluster,
        launcher,
        package,
        kind.script,
        *kind.words,
        *(taken if snapshots else []),
        python=FRAMEWORKS_PYTHON if kind.is_framework else PYTHON,
        options=["--snapshot-replicas=1"] if is_sharded else [],
        # Frameworks take as many threads as there are processors, in each of the four nodes that share these.
        variables={"OMP_NUM_THREADS": "1"} if kind.is_framework else None,
    ) as job:
        job.train(scenario.nodes_before, settle=0.0)
        with ExitStack() as asking:
            safe = asking.enter_context(_safe_steps(cluster, job)) if is_sharded else []
            time.sleep(_SETTLE_FRAMEWORKS if kind.is_framework else _SETTLE)
            event, found = scenario.recover(cluster, job, _LIMIT)
            workers = job.workers()
        if found is None:
            return None
        first_start = _first_start(workers, event, len(scenario.nodes_before))
        copies = _copies(workers, [each for each in safe if each[0] < event]) if safe else (None, None)
        return _Loss(found, *copies, first_start)


def _first_start(workers: Sequence[Worker], event: float, nodes: int) -> float | None:
    starts = [worker for worker in workers if worker.started < event and worker.world == nodes and worker.steps]
    models = [worker.reached["model"] for worker in starts if "model" in worker.reached]
    return min(worker.steps[0] for worker in starts) - max(models) if models else None


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


def _show(results: Results, found: _Found, names: Sequence[str], events: Sequence[Scenario], times: int) -> None:
    table = Table(
        "Four nodes with 256 MiB of state each, a snapshot after every step: what an event costs",
        ["training", "event", "steps repeated", "most", "a copy", "safe every", "gap", "without snapshots"],
        note=f"Medians of {times}. A copy: steps from the one that is copied to other nodes until it is safe. Safe "
        "every: steps from one that is safe to the next. Gap: seconds between two training steps; without snapshots "
        "the same training loads nothing and begins anew.",
    )
    for kind in names:
        for scenario in events:
            name, ours = _KINDS[kind].name, found[kind, scenario, True]
            lost, most = _lost(ours)
            copy = median(None if one is None else one.copy for one in ours)
            between = median(None if one is None else one.between for one in ours)
            gap, without = (median(_gaps(each)) for each in (ours, found[kind, scenario, False]))
            cells: list[Cell] = [_steps(value) for value in (lost, most, copy, between)]
            table.rows.append([name, scenario.value, *cells, seconds(gap), seconds(without)])
            # Shards of a node that leaves as announced are sent before it is gone.
            is_copied = kind == "fsdp2" and scenario is not Scenario.LEAVES
            allowed = 1 + (copy or 0.0) if is_copied else 1.0
            text = "1 step and those of a copy" if is_copied else "1 step"
            results.bars.append(
                Bar.at_most(f"{name}, {scenario.value}: at most {text} repeated", most, allowed, "steps")
            )
            more = None if gap is None or without is None else gap - without
            results.bars.append(Bar.at_most(f"{name}, {scenario.value}: at most 0.3 s more gap", more, 0.3))
    results.add(table)


def _show_frameworks(
    results: Results, found: _Found, names: Sequence[str], events: Sequence[Scenario], options: argparse.Namespace
) -> None:
    table = Table(
        "Four nodes that train by a framework: what an event costs with its lines, and under torchrun",
        [
            *("training", "event", "steps repeated", "most", "gap", "longest", "first start"),
            *("torchrun: steps repeated", "torchrun: gap"),
        ],
        note=f"Medians of {options.repetitions}, of torchrun {options.torchrun}. With the lines of the how-to there is "
        "a snapshot after every step; under torchrun tuned by hand the framework's own checkpoint every 20 steps. "
        "Gap: seconds between two training steps. First start: seconds from the model to the first step when there was "
        "nothing to load: what the framework and DistributedDataParallel do in them is part of a gap, too.",
    )
    for kind in names:
        for scenario in events:
            name, ours, theirs = _KINDS[kind].name, found[kind, scenario, True], found[kind, scenario, False]
            lost, most = _lost(ours)
            gaps = _gaps(ours)
            first_start = median(None if one is None else one.first_start for one in ours)
            cells: list[Cell] = [_steps(lost), _steps(most), *map(seconds, (median(gaps), longest(gaps), first_start))]
            beside = [_steps(_lost(theirs)[0]), seconds(median(_gaps(theirs)))] if theirs else ["", ""]
            table.rows.append([name, scenario.value, *cells, *beside])
            promise = f"{name}, {scenario.value}: at most 1 step repeated"
            results.bars.append(Bar.at_most(promise, most, 1.0, "steps"))
            if tiny := _gaps(found[_WIDE.get(kind, ""), scenario, True]):
                pairs = zip(gaps, tiny, strict=True)
                more = median(None if one is None or other is None else one - other for one, other in pairs)
                promise = f"{name}, {scenario.value}: at most 0.5 s more gap than without them"
                results.bars.append(Bar.at_most(promise, more, 0.5))
    results.add(table)


def _gaps(losses: Iterable[_Loss | None]) -> list[float | None]:
    return [None if one is None else one.recovery.gap for one in losses]


def _lost(losses: Iterable[_Loss | None]) -> tuple[float | None, float | None]:
    """The steps that were repeated: the median, and the most."""
    lost = [None if one is None else float(one.recovery.lost) for one in losses]
    return median(lost), longest(lost)


def _steps(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
