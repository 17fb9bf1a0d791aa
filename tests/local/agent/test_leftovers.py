"""Many round changes: what an agent holds afterwards, it held before."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.local.agent.test_health import ask, status, target
from tests.local.agents import Agent, Allocation, eventually

Allocate = Callable[..., Allocation]
FIRST, LAST = 3, 43
"""Rounds in which the agent is looked at. Whatever leaks leaks in every round."""
COME_AND_GO = 5
"""Of each kind: what an agent holds for a moment, or lacks in the first look as it comes a moment after the workers."""


def held(agent: Agent, temporary: Path) -> Counter[str]:
    """Kinds of descriptors and of files of an agent, and how many there are of each."""
    directory = Path(f"/proc/{agent.pid}")
    names = []
    for entry in (directory / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(entry.readlink()))
    names += [str(path.relative_to(temporary)) for path in temporary.rglob("slurm-elastic*")]
    # Numbers, and the random parts of names.
    return Counter(re.sub(r"(?<=slurm-elastic-)\S+|\d+", "N", name) for name in names)


def threads_of(nodes: Allocation, where: str) -> Counter[str]:
    """Names of an agent's threads, but for asyncio's pool, which has as many as it ever needed at once, and a limit."""
    said = ask(where, "/stacks", (nodes.run_dir / "health-token").read_text().strip())[1]
    names = re.findall(r"^thread ([A-Za-z][\w-]+)$", said, re.MULTILINE)
    return Counter(re.sub(r"\d+", "N", name) for name in names if "asyncio" not in name)


def test_round_changes_leave_no_thread_pipe_port_or_file_behind(allocate: Allocate, tmp_path: Path) -> None:
    nodes = allocate(1)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for round_ in range(LAST):
        if round_ != FIRST:
            nodes.touch(f"fail.{round_}.0", "1")
    options = ("--start=cold", "--max-restarts=1000", "--hang-timeout=60", "--log-dir=/dev/null")
    agent = nodes.start(1, *options, TMPDIR=str(temporary))
    where = target(nodes, 1)
    nodes.seen(FIRST)
    threads, before = threads_of(nodes, where), held(agent, temporary)
    nodes.touch(f"fail.{FIRST}.0", "1")
    for round_ in range(FIRST + 1, LAST + 1):
        nodes.seen(round_)

    def grown() -> Counter[str]:
        now = held(agent, temporary) + threads_of(nodes, where)
        return Counter({name: count for name, count in (now - before - threads).items() if count > COME_AND_GO})

    assert not grown()
    assert len(nodes.processes("worker.py")) == 1
    eventually(lambda: status(where)["round"]["number"] == LAST)
    nodes.finish(agent)
    assert not (nodes.run_dir / "logs" / "round_0000").exists()
    # torch makes one of its own.
    assert list(temporary.glob("slurm-elastic*")) == []
