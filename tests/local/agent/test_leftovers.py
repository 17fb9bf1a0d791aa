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
FIRST, LAST = 3, 203
"""Rounds in which the agent is looked at. Whatever leaks leaks in every round."""


def held(agent: Agent, temporary: Path) -> tuple[Counter[str], list[str]]:
    """Kinds of descriptors, and files of an agent."""
    directory = Path(f"/proc/{agent.pid}")
    names = []
    for entry in (directory / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(entry.readlink()))
    # Numbers, and the random parts of names.
    kinds = Counter(re.sub(r"(?<=slurm-elastic-)\S+|\d+", "N", name) for name in names)
    files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("slurm-elastic*"))
    return kinds, files


def threads_of(nodes: Allocation, where: str) -> list[str]:
    """Names of an agent's threads, but for asyncio's pool, which has as many as it ever needed at once, and a limit."""
    said = ask(where, "/stacks", (nodes.run_dir / "health-token").read_text().strip())[1]
    return sorted(
        name for name in re.findall(r"^thread ([A-Za-z][\w-]+)$", said, re.MULTILINE) if "asyncio" not in name
    )


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
    threads = threads_of(nodes, where)
    before = _settled(agent, temporary)
    nodes.touch(f"fail.{FIRST}.0", "1")
    for round_ in range(FIRST + 1, LAST + 1):
        nodes.seen(round_)
    eventually(
        lambda: held(agent, temporary) == before, lambda: f"{before}\nwas once, and now\n{held(agent, temporary)}"
    )
    assert threads_of(nodes, where) == threads
    assert len(nodes.processes("worker.py")) == 1
    assert status(where)["round"]["number"] == LAST
    nodes.touch("finish")
    assert agent.wait() == 0
    # torch makes one of its own.
    assert list(temporary.glob("slurm-elastic*")) == []


def _settled(agent: Agent, temporary: Path) -> tuple[Counter[str], list[str]]:
    """What is held in the middle of a round: some of it comes a moment after the workers."""
    looks: list[tuple[Counter[str], list[str]]] = []

    def same() -> bool:
        looks.append(held(agent, temporary))
        return len(looks) >= 50 and all(look == looks[-1] for look in looks[-50:])

    eventually(same)
    return looks[-1]
