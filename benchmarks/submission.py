"""From submit() to the first line of the function, on one node: by submitit alone, and with an elastic agent.

    python -m benchmarks.submission [--runs N] [--json FILE]

Brings up a test cluster, so it needs root. All its nodes are this machine, whose monotonic clock is compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.job import WORK, installed_package, require_root, running_cluster
from benchmarks.launchers import PYTHON
from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table, median, seconds
from tests.cluster.testbed import Cluster, Settings

_MOST = 1.5
"""Seconds that the agent may add."""

_SUBMITTING = """\
import json, sys, time

import submitit

import slurm_elastic


def first_line():
    import time

    return time.monotonic()


def measure(executor):
    executor.update_parameters(timeout_min=5, slurm_partition="low", slurm_exclusive=True)
    begin = time.monotonic()
    return executor.submit(first_line).result() - begin


found = {"submitit": [], "elastic": []}
for _ in range(int(sys.argv[1])):
    found["submitit"].append(measure(submitit.AutoExecutor("plain", cluster="slurm")))
    found["elastic"].append(measure(slurm_elastic.ElasticExecutor("elastic")))
print(json.dumps(found))
"""


def main() -> int:
    """Measure and show."""
    parser = make_parser("submission")
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="of each (default: 7)")
    options = parser.parse_args()
    require_root()
    results = Results.of("submission")
    settings = Settings("benchmark", accounting=True)
    with installed_package() as package, running_cluster(settings) as cluster:
        found = _measure(cluster, package, options.runs)
    table = Table(
        "From submit() to the first line of the function (s)",
        ["", "median", "longest"],
        note=f"Of {options.runs} submissions each, in turn; one worker. Nothing of submitit's own imports torch.",
    )
    for name, values in found.items():
        table.rows.append([name, seconds(median(values)), seconds(max(values))])
    results.add(table)
    plain, elastic = median(found["submitit"]), median(found["elastic"])
    added = None if plain is None or elastic is None else elastic - plain
    results.bars.append(Bar.at_most(f"agents add at most {_MOST} s", added, _MOST))
    return results.finish(options.json)


def _measure(cluster: Cluster, package: Path, runs: int) -> dict[str, list[float]]:
    directory = Path(tempfile.mkdtemp(prefix="submission-", dir=WORK))
    shutil.chown(directory, "elastic", "elastic")
    try:
        done = cluster.command(
            [str(PYTHON), "-c", _SUBMITTING, str(runs)],
            cwd=directory,
            env={"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
            timeout=120.0 * runs,
        )
    finally:
        shutil.rmtree(directory)
    found: Any = json.loads(done.stdout)
    return dict(found)


if __name__ == "__main__":
    sys.exit(main())
