"""What an agent costs while its workers need nothing from it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.job import Job, wait
from benchmarks.launchers import Launcher
from benchmarks.tables import Bar, Results, Table
from benchmarks.usage import cpu_seconds
from tests.cluster.testbed import Cluster
from tests.cluster.testbed.processes import Process

_SETTLE = 5.0
_HOST = "n1"


@dataclass(frozen=True, slots=True)
class Idle:
    """Of the agents of one run: percent of a core on the first node, and the most on another; messages of one agent."""

    first: float
    others: float
    sent: float
    received: float


def measure(cluster: Cluster, launcher: Launcher, package: Path, seconds: float) -> Idle:
    """Watch the agents of four nodes for some seconds while their workers sleep."""
    nodes = cluster.settings.node_names
    with Job(cluster, launcher, package, "steps.py", "idle") as job:
        job.start(nodes)
        if not wait(lambda: len(job.workers()) == len(nodes), limit=120.0):
            raise RuntimeError(f"{launcher.value}: the workers do not start")
        time.sleep(_SETTLE)
        agents = {node: job.agent_on(node) for node in nodes}
        begin, cpu = time.monotonic(), {node: cpu_seconds(agent.pid) for node, agent in agents.items()}
        messages = _messages(cluster, "n2", agents["n2"])
        time.sleep(seconds)
        taken = time.monotonic() - begin
        share = {node: (cpu_seconds(agent.pid) - cpu[node]) / taken * 100 for node, agent in agents.items()}
        later = _messages(cluster, "n2", agents["n2"])
        return Idle(
            first=share[_HOST],
            others=max(value for node, value in share.items() if node != _HOST),
            sent=(later[0] - messages[0]) / taken,
            received=(later[1] - messages[1]) / taken,
        )


def judge(results: Results, found: dict[Launcher, Idle], seconds: float) -> None:
    """Show and judge what was measured."""
    table = Table(
        "An idle agent",
        [
            *("launcher", "first node: CPU s/min", "% of a core", "others: CPU s/min", "% of a core"),
            *("sent/s", "received/s"),
        ],
        note=f"Over {seconds:.0f} s with four nodes whose workers sleep; the first node leads, or hosts the store. "
        "Others: the busiest of three. Messages: TCP segments with data on all connections of one agent.",
    )
    for launcher, idle in found.items():
        shares = [text for share in (idle.first, idle.others) for text in (f"{share * 0.6:.3f}", f"{share:.2f}")]
        table.rows.append([launcher.value, *shares, f"{idle.sent:.1f}", f"{idle.received:.1f}"])
    results.add(table)
    ours, torchrun = found.get(Launcher.OURS), found.get(Launcher.DEFAULTS)
    if ours is None:
        return
    results.bars.append(Bar.at_most("idle agent below 1 % of a core", max(ours.first, ours.others), 1.0, "%"))
    if torchrun is not None:
        ratio = max(ours.first / torchrun.first, ours.others / torchrun.others)
        results.bars.append(Bar.at_most("idle agent: at most half of torchrun's CPU", ratio, 0.5, "of torchrun's"))


def _messages(cluster: Cluster, node: str, agent: Process) -> tuple[int, int]:
    """Segments with data that the agent has sent and received on the connections that it has (ss(8), --info)."""
    shown = cluster.command(["ss", "-HtinpO", "state", "established"], user="root", machine=node).stdout
    lines = [line for line in shown.splitlines() if f"pid={agent.inner_pid}," in line]
    return _sum("data_segs_out", lines), _sum("data_segs_in", lines)


def _sum(name: str, lines: list[str]) -> int:
    return sum(int(found[1]) for line in lines if (found := re.search(rf"\b{name}:(\d+)", line)))
