"""How long training stands still when the node that leads is killed, and when it is preempted and hands over.

    python -m benchmarks.failover [--json FILE] [--repetitions 5]

Runs the digits example as a user submits it on a real Slurm cluster of four nodes on this machine: as an allocation,
whose first node is killed, and as an array, in which the leader's element is preempted, and then the node of the next
leader killed. About 5 minutes in all. Needs root, for the cluster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.job import require_root, running_cluster, wait
from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table, longest, median, seconds
from tests.cluster import gaps
from tests.cluster.conftest import CHECKOUT, own_environment, remove_shared_directory, shared_directory
from tests.cluster.jobs import Job, Jobs
from tests.cluster.testbed import Cluster, Settings

_SETTLE = 4.0
"""Seconds of training before anything happens: the state that a long training is in."""
_TAKEN = 3.0
"""Seconds for which the element of the leader has to go."""
_KILLED_LIMIT, _HAND_OVER_LIMIT = 2.0, 1.2
_LIMIT = 60.0
"""Seconds after which training is taken not to go on."""
_BACK = 180.0
"""Seconds in which Slurm has to give everything back."""
_ALLOCATION, _ARRAY = "first node of an allocation killed", "node of an array's leader killed"
_HAND_OVER = "element of an array's leader preempted"

Found = dict[str, list[float | None]]


def main() -> int:
    """Measure, show and judge."""
    options = make_parser("failover", repetitions=5).parse_args()
    require_root()
    results = Results.of("failover")
    with running_cluster(Settings("failover")) as cluster, own_environment() as programs:
        found: Found = {_ALLOCATION: _allocations(cluster, programs, options.repetitions)}
        found.update(_array(cluster, programs, options.repetitions))
    _show(results, found)
    return results.finish(options.json)


def _allocations(cluster: Cluster, programs: Path, repetitions: int) -> list[float | None]:
    """Kill the first node of as many jobs, one after the other: a job does not get a node back."""
    found = []
    for number in range(1, repetitions + 1):
        with _training(cluster, programs, "--nodes=4", "elastic.sbatch") as job:
            _settle(job, 4)
            found.append(_kill_leader(cluster, job))
            _tell(number, _ALLOCATION, found[-1])
            job.cancel()
        cluster.restore()
    return found


def _array(cluster: Cluster, programs: Path, repetitions: int) -> Found:
    """Preempt the leader's element and kill its node, in turn, of one array."""
    found: Found = {_HAND_OVER: [], _ARRAY: []}
    with _training(cluster, programs, "--array=0-3", "array.sbatch", "--nnodes=1:4") as job:
        for number in range(1, repetitions + 1):
            _settle(job, 4)
            found[_HAND_OVER].append(_preempt_leader(cluster, programs, job))
            _tell(number, _HAND_OVER, found[_HAND_OVER][-1])
            # The one that was preempted comes back later.
            _settle(job, 3)
            leader = job.leader()
            found[_ARRAY].append(_kill_leader(cluster, job))
            _tell(number, _ARRAY, found[_ARRAY][-1])
            cluster.start(leader)
        job.cancel()
    cluster.restore()
    return found


@contextmanager
def _training(cluster: Cluster, programs: Path, *submitted: str) -> Iterator[Job]:
    """The digits example, until it is cancelled, in a directory of its own; kept if something goes wrong."""
    directory = shared_directory("benchmark-failover")
    jobs = Jobs(cluster, directory, programs)
    jobs.place(CHECKOUT / "sbatch_templates/array.sbatch")
    jobs.place(CHECKOUT / "docs/examples/digits.py")
    jobs.place(CHECKOUT / "tests/cluster/timed_digits.py")
    script = ["timed_digits.py", "--step-time", "0.03", "--checkpoint-every", "20", "--checkpoint-dir", "."]
    try:
        yield jobs.submit(*submitted, *script)
    except BaseException:
        print(f"kept: {directory}")
        raise
    cluster.cancel_all()
    remove_shared_directory(directory)


def _settle(job: Job, nodes: int) -> None:
    """Wait until at least so many train, and have done so for a while."""

    def whole() -> bool:
        tables = job.tables()
        return bool(tables) and len(tables[-1]) >= nodes and gaps.has_stepped(job, len(tables) - 1)

    rounds = -1
    while rounds != len(job.tables()):
        job.wait_until(f"no {nodes} nodes train", whole, _BACK)
        rounds = len(job.tables())
        time.sleep(_SETTLE)


def _kill_leader(cluster: Cluster, job: Job) -> float | None:
    """End all processes of the leader's node at once; seconds without a step."""
    first = len(job.tables())
    cluster.kill(job.leader())
    if not wait(lambda: gaps.between(job, first) is not None, _LIMIT):
        return None
    return gaps.between(job, first)


def _preempt_leader(cluster: Cluster, programs: Path, job: Job) -> float | None:
    """Have Slurm take the node of the leader's element; seconds without a step, without those of the checkpoint."""
    first, epoch = len(job.tables()), job.rounds()[-1]["epoch"]
    Jobs(cluster, job.directory, programs).take(job.leader(), _TAKEN)
    if not wait(lambda: gaps.between(job, first) is not None, _LIMIT):
        return None
    change = gaps.change(job, first)
    if change.lost or change.charged or job.rounds()[first]["epoch"] == epoch:
        raise RuntimeError(f"no hand-over without loss: {change}")
    if change.gap is None:
        return None
    print(f"   {change.gap}", flush=True)
    return change.gap.whole


def _tell(number: int, event: str, gap: float | None) -> None:
    print(f"{number}: {event}: gap {seconds(gap)} s", flush=True)


def _show(results: Results, found: Found) -> None:
    table = Table(
        "Seconds without a training step when the leader goes",
        ["event", "times", "gap", "longest"],
        note="Medians of so many times. Gap: between the last step before and the first one after, so with the start "
        "of the workers, and without the writing of the checkpoint where there is time for one.",
    )
    for event, gaps_ in found.items():
        table.rows.append([event, len(gaps_), seconds(median(gaps_)), seconds(longest(gaps_))])
        limit = _HAND_OVER_LIMIT if event == _HAND_OVER else _KILLED_LIMIT
        results.bars.append(Bar.at_most(f"{event}: gap of at most {limit} s", median(gaps_), limit))
    results.add(table)


if __name__ == "__main__":
    sys.exit(main())
