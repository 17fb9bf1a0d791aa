"""Thousands of agents beside one leader, in as many processes as their open files need.

A search for a leader takes up to four descriptors per agent, so a process plays 4,096 agents at most: they stay below
a limit of 20,000 open files. :mod:`benchmarks.herd_process` is one such process.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from benchmarks.herd_process import Add, Command, Kill, Mute, Progress, play
from benchmarks.usage import process_cpu_seconds
from slurm_elastic.rundir import RunDir

PROCESS_AGENTS = 4096
"""Agents that one process plays at the start; some more may join later."""


class NotReachedError(Exception):
    """What a row waits for did not come about in time, or an agent gave up."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and bytes of all agents, both ways; handshakes count as bytes only."""

    messages: int = 0
    bytes: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages - other.messages, self.bytes - other.bytes)


class Herd:
    """The agents of one run.

    Args:
        run: Run id and incarnation.
        run_dir: The run directory, which has the records.
        size: Number of agents that the run expects.
    """

    def __init__(self, run: str, run_dir: RunDir, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._progress: dict[Connection, Progress] = {}
        self._agents: set[int] = set()
        for _ in range(math.ceil(size / PROCESS_AGENTS)):
            pipe, other = context.Pipe()
            process = context.Process(target=play, args=(other, run, run_dir, size), daemon=True)
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        for pipe in self._pipes:
            self._progress[pipe] = pipe.recv()

    def add(self, indices: Iterable[int]) -> None:
        """Let new agents on the nodes n<index> connect and join."""
        self._agents.update(indices := [*indices])
        self._tell(Add, indices)

    def mute(self, indices: Iterable[int]) -> None:
        """Let agents say nothing from here on; what comes after the proof of identity on a new connection, too."""
        self._tell(Mute, indices)

    def kill(self, indices: Iterable[int]) -> None:
        """End agents as the end of their processes does."""
        self._agents.difference_update(indices := [*indices])
        # All processes know of it: an agent that looks for a leader finds that those have ended.
        for pipe in self._pipes:
            pipe.send(Kill(indices))

    def first(self, number: int) -> list[int]:
        """So many of the agents that live."""
        return sorted(self._agents)[:number]

    def processes(self) -> int:
        """Number of the processes that play the agents."""
        return len(self._processes)

    def cpu(self) -> float:
        """CPU time of all these processes until now, in seconds."""
        return sum(process_cpu_seconds(process.pid) for process in self._processes if process.pid is not None)

    def traffic(self) -> Traffic:
        """What was said until now."""
        found = self._progress.values()
        return Traffic(sum(each.messages for each in found), sum(each.bytes for each in found))

    @property
    def newest(self) -> int:
        """The newest round in which an agent holds a place."""
        return max(each.round for each in self._progress.values())

    @property
    def placed_at(self) -> float:
        """When an agent got its place last (CLOCK_MONOTONIC, which all processes share)."""
        return max(each.placed_at for each in self._progress.values())

    def hold_places(self, agents: int, after: int) -> Callable[[], bool]:
        """Whether so many agents hold a place in one round that is newer than `after`."""

        def done() -> bool:
            newest = self.newest
            placed = sum(each.placed for each in self._progress.values() if each.round == newest)
            return newest > after and placed >= agents

        return done

    def wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Return when `done`.

        Raises:
            NotReachedError: not in time, or an agent gave up.
        """
        end = time.monotonic() + timeout
        while not done():
            left = end - time.monotonic()
            if left <= 0.0:
                raise NotReachedError(f"not within {timeout:.0f} s")
            self._follow(left)

    def rest(self, seconds: float) -> None:
        """Let the agents live for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0.0:
            self._follow(left)

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _tell(self, kind: Callable[[list[int]], Command], indices: Iterable[int]) -> None:
        shares: list[list[int]] = [[] for _ in self._pipes]
        for index in indices:
            shares[index % len(shares)].append(index)
        for pipe, share in zip(self._pipes, shares, strict=True):
            if share:
                pipe.send(kind(share))

    def _follow(self, seconds: float) -> None:
        """Take in what the processes report, within so many seconds."""
        for pipe in wait(self._pipes, seconds):
            assert isinstance(pipe, Connection)
            try:
                found: Progress = pipe.recv()
            except EOFError:
                raise NotReachedError("a process that plays agents has ended") from None
            self._progress[pipe] = found
            if found.problem:
                raise NotReachedError(found.problem)
