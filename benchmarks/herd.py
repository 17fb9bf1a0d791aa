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
from multiprocessing.context import SpawnProcess

from benchmarks.herd_process import Command, Progress, no_report, play
from benchmarks.usage import Usage, cpu_seconds, usage
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


class Herd:
    """The agents of one run.

    Args:
        run: Run id and incarnation.
        run_dir: The run directory.
        size: Number of agents that the run expects.
        etcd: Where the records are; empty for the run directory.
        report: Returns what the agent on node n<index> reports to a client of the leader.
    """

    def __init__(
        self, run: str, run_dir: RunDir, size: int, etcd: str = "", report: Callable[[int], str] = no_report
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._progress: dict[Connection, Progress] = {}
        self._agents: set[int] = set()
        for _ in range(math.ceil(size / PROCESS_AGENTS)):
            pipe, other = context.Pipe()
            process = context.Process(target=play, args=(other, run, run_dir, size, etcd, report), daemon=True)
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        for pipe in self._pipes:
            self._progress[pipe] = pipe.recv()

    def connect(self, indices: Iterable[int]) -> None:
        """Let new agents on the nodes n<index> connect to the leader."""
        self._agents.update(indices := [*indices])
        self._tell("connect", indices)

    def join(self, indices: Iterable[int]) -> None:
        """Let agents that connect ask for a place."""
        self._tell("join", indices)

    def add(self, indices: Iterable[int]) -> None:
        """Let new agents on the nodes n<index> connect and join."""
        self.connect(indices := [*indices])
        self.join(indices)

    def mute(self, indices: Iterable[int]) -> None:
        """Let agents say nothing from here on; what comes after the proof of identity on a new connection, too."""
        self._tell("mute", indices)

    def leave(self, indices: Iterable[int]) -> None:
        """Let agents announce their leave, and go."""
        self._agents.difference_update(indices := [*indices])
        self._tell("leave", indices)

    def kill(self, indices: Iterable[int]) -> None:
        """End agents as the end of their processes does."""
        self._agents.difference_update(indices := [*indices])
        # All processes know of it: an agent that looks for a leader finds that those have ended.
        for pipe in self._pipes:
            pipe.send(("kill", indices))

    def first(self, number: int) -> list[int]:
        """So many of the agents that live."""
        return sorted(self._agents)[:number]

    def usage(self) -> Usage:
        """What the first of these processes uses now."""
        return usage(self._processes[0].pid)

    def cpu(self) -> float:
        """CPU time of all these processes until now, in seconds."""
        return sum(cpu_seconds(process.pid) for process in self._processes)

    def traffic(self) -> Traffic:
        """What was said until now."""
        found = self._progress.values()
        return Traffic(sum(each.messages for each in found), sum(each.bytes for each in found))

    def connected(self, agents: int) -> Callable[[], bool]:
        """Whether at least `agents` agents are connected."""
        return lambda: sum(each.connected for each in self._progress.values()) >= agents

    @property
    def newest(self) -> int:
        """The newest round in which an agent holds a place."""
        return max(each.round for each in self._progress.values())

    @property
    def placed_at(self) -> float:
        """When an agent got its place last (CLOCK_MONOTONIC, which all processes share)."""
        return max(each.placed_at for each in self._progress.values())

    def hold_places(self, agents: int, after: int) -> Callable[[], bool]:
        """Whether at least `agents` agents hold a place in one round that is newer than `after`."""

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
            self.follow(left)

    def rest(self, seconds: float) -> None:
        """Let the agents live for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0.0:
            self.follow(left)

    def follow(self, seconds: float) -> None:
        """Take in what the processes report, within `seconds` seconds."""
        for pipe in wait(self._pipes, seconds):
            assert isinstance(pipe, Connection)
            try:
                found: Progress = pipe.recv()
            except EOFError:
                raise NotReachedError("a process that plays agents has ended") from None
            self._progress[pipe] = found
            if found.problem:
                raise NotReachedError(found.problem)

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _tell(self, command: Command, indices: Iterable[int]) -> None:
        shares: list[list[int]] = [[] for _ in self._pipes]
        for index in indices:
            shares[index % len(shares)].append(index)
        for pipe, share in zip(self._pipes, shares, strict=True):
            if share:
                pipe.send((command, share))
