"""Agents' memories on one machine, whose rounds a test publishes, and workers that use them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slurm_elastic import snapshot
from slurm_elastic.snapshot.agent_side import AgentMemory
from slurm_elastic.snapshot.lineage import choose

_fork = multiprocessing.get_context("fork")


class Agents:
    """Agents of one run, whose rounds the test publishes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._by_name: dict[str, AgentMemory] = {}
        self.round: int | None = None
        self.origin = ""

    def add(self, name: str, secret: bytes = b"s" * 32) -> AgentMemory:
        (self._directory / name).mkdir()
        made = AgentMemory(self._directory / name, secret, "7.0", name, name, "127.0.0.1")
        self._by_name[name] = made
        return made

    def next_round(self, agents: Sequence[AgentMemory]) -> list[dict[str, str]]:
        """Return the variables of the workers on each agent."""
        self.origin = choose(self.round, self.origin, [agent.inventory() for agent in agents])
        self.round = 0 if self.round is None else self.round + 1
        variables = [agent.begin(self.round, self.origin, first=index == 0) for index, agent in enumerate(agents)]
        return [{**each, "SLURM_ELASTIC_ROUND": str(self.round), "LOCAL_RANK": "0"} for each in variables]

    def close(self) -> None:
        for agent in self._by_name.values():
            agent.close()


def in_worker(variables: dict[str, str], work: Any) -> Any:
    """Return what a worker with this environment returns; it is forked, and its memory is gone with it."""
    receiving, sending = _fork.Pipe(duplex=False)

    def main() -> None:
        os.environ.update(variables)
        torch.set_num_threads(1)
        sending.send(work())

    process = _fork.Process(target=main)
    process.start()
    sending.close()
    with contextlib.suppress(EOFError):
        result = receiving.recv()
        process.join()
        return result
    process.join()
    return None


def saves(*steps: int, size: int = 1000) -> Any:
    def work() -> bool:
        for step in steps:
            snapshot.save(step, weights=torch.full((size,), float(step)), progress={"step": step})
        return True

    return work


def loads() -> tuple[float, int] | None:
    """The value of the weights, and the step."""
    weights, progress = snapshot.load(weights=torch.zeros(1), progress=None)
    assert (weights == weights[0]).all()
    return None if progress is None else (float(weights[0]), progress["step"])
