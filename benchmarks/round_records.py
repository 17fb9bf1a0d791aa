"""How large the record of a round is, and how long an agent takes to read it.

    python -m benchmarks.round_records [--sizes 1024,16384,100000] [--json FILE]

The record is written to a run directory by the leader's code, and read as by an agent that searches for the leader:
with the record, and without it where the agent knows the round. The value that etcd would get is compressed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import add_sizes, make_parser
from benchmarks.tables import Results, Table
from slurm_elastic.rendezvous.election.campaign import ElectionConfig, locate
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.leader.fenced_records import FencedRecords
from slurm_elastic.rendezvous.membership.agents import AgentInfo, Reason
from slurm_elastic.rendezvous.membership.assignment import build_table
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.records.api import RunDirRecords
from slurm_elastic.rendezvous.records.etcd.records import signed_value
from slurm_elastic.rundir import RunDir

_RUN = "records.0"
_ENDPOINT = {"agent": "n0/1234.0/4321", "address": "10.0.0.1", "port": 29400, "epoch": 1}


def main() -> int:
    """Measure and show."""
    parser = make_parser("round_records")
    add_sizes(parser, "--sizes", 1024, 16384, 100000)
    options = parser.parse_args()
    results = Results.of("round_records")
    table = Table(
        "Records of rounds",
        ["agents", "record KiB", "in etcd KiB", "write s", "read s", "read, round known ms"],
        note="Once each. The file system is that of the machine's temporary directory.",
    )
    for size in options.sizes:
        table.rows.append(_measure(size))
    results.add(table)
    return results.finish(options.json)


def _measure(size: int) -> list[str | int | None]:
    numbers = random.Random(size)
    agents = (
        AgentInfo(
            f"n{index}/1234.0/{numbers.randrange(1 << 22)}",
            f"n{index}",
            index,
            8,
            "default",
            f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}",
            29400,
            numbers.randrange(1 << 15, 61000),
        )
        for index in range(size)
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        run_dir = RunDir.for_run(Path(place), "records").open()
        records = RunDirRecords(run_dir, _RUN)
        config = ElectionConfig(incarnation=_RUN, settings=Settings(1, size), endpoints=())
        fenced = FencedRecords(records, _RUN, 1, _ENDPOINT, None)
        begin = time.perf_counter()
        fenced.write_round(build_table(0, Reason.START, agents, 0))
        written = time.perf_counter()
        found = locate(config, records.situation(), LeaderLocation())
        read = time.perf_counter()
        again = locate(config, records.situation(found.round), found)
        end = time.perf_counter()
        if len(found.successors) != size or again != found:
            raise RuntimeError("the record is not what was written")
        largest = max(path.stat().st_size for path in run_dir.path.rglob("*") if path.is_file())
        record = records.situation().round
        assert record is not None
        in_etcd = len(signed_value(b"secret", "round", {"number": 0, "record": record}))
    sizes = (f"{largest / 1024:,.0f}", f"{in_etcd / 1024:,.0f}")
    return [size, *sizes, f"{written - begin:.3f}", f"{read - written:.3f}", f"{1000 * (end - read):.2f}"]


if __name__ == "__main__":
    sys.exit(main())
