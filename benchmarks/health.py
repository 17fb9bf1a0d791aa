"""How fast the health port answers while a node trains, and what a flood of requests costs the training.

    python -m benchmarks.health [--seconds S] [--pairs N] [--rounds N] [--rate R] [--json FILE]

One agent with one worker, outside Slurm. The worker's steps are 20 ms of arithmetic on one core, so that whatever the
agent takes from it is seen. A stranger asks from another process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.tables import Bar, Results, Table, median
from tests.local.waiting import eventually

_PAGES = ("/healthz", "/status", "/metrics")
_WORKER = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
round_ = os.environ["SLURM_ELASTIC_ROUND"]
with (here / f"steps.{round_}").open("w", buffering=1) as log:
    while True:
        total = 0
        for number in range(400_000):
            total += number
        log.write(f"{time.monotonic()}\\n")
        if (here / f"fail.{round_}").exists():
            sys.exit(1)
"""
_FLOOD = """
import http.client, sys, time
port, rate, seconds, page = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
# The port makes whoever asks more than 100 times a second wait, so a stranger takes many connections.
clients = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(20)]
begin, asked = time.monotonic(), 0
while time.monotonic() - begin < seconds:
    while asked < (time.monotonic() - begin) * rate and time.monotonic() - begin < seconds:
        client = clients[asked % len(clients)]
        client.request("GET", page)
        client.getresponse().read()
        asked += 1
    time.sleep(0.001)
print(asked / (time.monotonic() - begin))
"""


@dataclass(frozen=True, slots=True)
class Node:
    """An agent that trains.

    Attributes:
        directory: of its worker.
        port: of its health port.
    """

    directory: Path
    port: int

    def ask(self, page: str) -> float:
        """Milliseconds until the answer, by a connection of its own."""
        begin = time.monotonic()
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request("GET", page)
            response = client.getresponse()
            response.read()
            if response.status != 200:
                raise RuntimeError(f"{page} says {response.status}")
        return (time.monotonic() - begin) * 1000

    def steps(self, round_: int = 0) -> list[float]:
        """When the steps of a round were done."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.directory / f"steps.{round_}").read_text().splitlines(keepends=True)
            return [float(line) for line in lines if line.endswith("\n")]
        return []


def main() -> int:
    """Measure, show, judge."""
    parser = make_parser("health")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    parser.add_argument("--pairs", type=int, default=5, help="with and without a flood (default: 5)")
    parser.add_argument("--rounds", type=int, default=10, help="round changes (default: 10)")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second of the flood (default: 1000)")
    options = parser.parse_args()
    results = Results.of("health")
    with _node() as node:
        _answers(results, node, options.seconds, options.rounds)
        _flood(results, node, options.rounds, options.pairs, options.seconds, options.rate)
    return results.finish(options.json)


@contextlib.contextmanager
def _node() -> Iterator[Node]:
    directory = Path(tempfile.mkdtemp(prefix="slurm-elastic-health-"))
    (directory / "train.py").write_text(_WORKER)
    command = [sys.executable, "-m", "slurm_elastic", "agent", "--run-id=benchmark", "--max-restarts=1000"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_"))}
    agent = subprocess.Popen(
        [*command, "--start=cold", f"--run-dir={directory}", str(directory / "train.py"), str(directory)],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        published = directory / "elastic-runs/benchmark/health/localhost.0.json"
        eventually(published.exists)
        target = json.loads(published.read_text())[0]["targets"][0]
        node = Node(directory, int(target.rpartition(":")[2]))
        eventually(lambda: len(node.steps()) > 20)
        yield node
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()
        shutil.rmtree(directory)


def _answers(results: Results, node: Node, seconds: float, rounds: int) -> None:
    table = Table(
        "Answers, in ms",
        ["page", "median", "p99", "longest", "requests"],
        note="Each request by a new connection, one after the other, 5 ms apart. A round change is the failure of the "
        "worker, from the moment it is told to fail until the next one has taken a step.",
    )
    for page in _PAGES:
        node.ask(page)
    found = {page: _asked(node, page, seconds) for page in _PAGES}
    changes: list[float] = []
    for round_ in range(rounds):
        (node.directory / f"fail.{round_}").touch()
        while not node.steps(round_ + 1):
            changes.append(node.ask("/healthz"))
            time.sleep(0.005)
    for name, taken in [*found.items(), ("/healthz during round changes", changes)]:
        shown = [f"{value:.2f}" for value in (statistics.median(taken), _p99(taken), max(taken))]
        table.rows.append([name, *shown, len(taken)])
    results.add(table)
    for name, taken in (("while it trains", found["/healthz"]), ("during a round change", changes)):
        results.bars.append(Bar.at_most(f"/healthz {name}: median below 5 ms", statistics.median(taken), 5.0, "ms"))
        results.bars.append(Bar.at_most(f"/healthz {name}: p99 below 50 ms", _p99(taken), 50.0, "ms"))


def _asked(node: Node, page: str, seconds: float) -> list[float]:
    end = time.monotonic() + seconds
    taken = []
    while time.monotonic() < end:
        taken.append(node.ask(page))
        time.sleep(0.005)
    return taken


def _flood(results: Results, node: Node, round_: int, pairs: int, seconds: float, rate: float) -> None:
    table = Table(
        f"Steps under {rate:.0f} requests per second",
        ["pair", "steps/s without", "steps/s with", "lost", "requests/s"],
        note="The stranger asks /healthz on 20 connections. Without: it runs and asks nothing.",
    )
    lost = []
    for pair in range(pairs):
        # Which comes first takes turns.
        order = (0.0, rate) if pair % 2 == 0 else (rate, 0.0)
        speeds, reached = {}, 0.0
        for asked in order:
            begin = time.monotonic()
            command = [sys.executable, "-c", _FLOOD, str(node.port), str(asked), str(seconds), "/healthz"]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            end = time.monotonic()
            speeds[asked] = sum(begin <= step <= end for step in node.steps(round_)) / (end - begin)
            reached = max(reached, float(said))
        lost.append((1 - speeds[rate] / speeds[0.0]) * 100)
        shown = [f"{speeds[0.0]:.1f}", f"{speeds[rate]:.1f}", f"{lost[-1]:.1f} %", f"{reached:.0f}"]
        table.rows.append([str(pair + 1), *shown])
    results.add(table)
    results.bars.append(
        Bar.at_most(f"{rate:.0f} requests per second cost below 2 % of the steps", median(lost), 2.0, "%")
    )


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    sys.exit(main())
