"""Another ordinary user on the nodes of a cluster: a program of tests/local/neighbour.py on each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from slurm_elastic.rendezvous.transport.session import Role, Session
from slurm_elastic.slurm.address import ephemeral_low, port_sequence
from tests.cluster.jobs import CHECKOUT, Job, Jobs
from tests.cluster.testbed.settings import NEIGHBOUR

PYTHON = "/usr/bin/python3.11"
"""Of all machines, whatever their Slurm's Debian (testbed/boot.sh); the environment of jobs is the other user's."""


class Neighbours:
    """What one does to a run, on node after node.

    Args:
        jobs: whose cluster it is.
        job: of the run.
        reports: a directory in which everybody may write.
    """

    def __init__(self, jobs: Jobs, job: Job, reports: Path) -> None:
        self._jobs, self._job, self._reports = jobs, job, reports
        self._program = jobs.place(CHECKOUT / "tests/local/neighbour.py")
        self._ports = port_sequence(str(job.id), 0, ephemeral_low())
        self._started: list[Path] = []

    def start(self, node: str) -> None:
        """Begin on a node; what is there already dies with the node."""
        report = self._reports / f"{node}.{len(self._started)}.json"
        self._started.append(report)
        greeting = Session(Role.AGENT, bytes(32), f"{self._job.id}.0", agent=f"{node}/1.0/1").start().hex()
        words = [self._job.run_dir, node, self._reports / "over", report, "", greeting, *self._ports]
        self._jobs.cluster.popen(
            [PYTHON, str(self._program), *map(str, words)],
            user=NEIGHBOUR,
            machine=node,
            stdout=report.with_suffix(".log").open("w"),
        )

    def end(self) -> tuple[Counter[str], list[str]]:
        """Have them end, and return how often they did what, and what that changed."""
        (self._reports / "over").touch()
        living = [path for path in self._started if self._newest(path)]
        self._jobs.cluster.wait_until("a neighbour does not end", lambda: all(_read(path)["over"] for path in living))
        found = [_read(path) for path in self._started]
        did: Counter[str] = Counter()
        for report in found:
            did.update(report["did"])
        return did, [f"a neighbour changed: {what}" for report in found for what in report["changed"]]

    def _newest(self, path: Path) -> bool:
        """Those before on the node have died with it."""
        node = path.name.partition(".")[0]
        return path == [other for other in self._started if other.name.startswith(f"{node}.")][-1]


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report
