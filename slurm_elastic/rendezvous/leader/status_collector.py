"""Collects the reports of all agents for clients that ask what the run does now.

What that costs the leader is bounded, however many ask and however often: one message to and from each agent per
collection, collections so far apart that they cost no more than heartbeats do, `_CLIENTS` clients that wait, and no
report is kept: parts go out as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from slurm_elastic.rendezvous.leader.agent_connections import AgentConnections
from slurm_elastic.rendezvous.status_requests import StatusAnswer, StatusPart, StatusReport, StatusRequested
from slurm_elastic.slurm import compress

__all__ = ["StatusCollector"]

_CLIENTS = 16
"""Clients that are answered together; further ones are told that the leader is busy."""
_LIMIT = 1.5
"""Seconds that agents have for their reports; as long as the pause, where they are many."""
_PER_SECOND = 512
"""Agents that are asked per second, on average over collections; as many heartbeats are sent."""
_PAUSE = 1.0
"""Seconds between the starts of two collections, at least."""
_AT_ONCE = 64
"""Agents that are asked before the leader looks after its connections again."""
_PART = 32
"""Reports in one message: at most 256 KiB of the 1 MiB that a message may have."""
_SILENT_NODES = 4096
"""Nodes that the list of those that have not answered names at most."""


class StatusCollector:
    """One leader's collections, one at a time. All methods are called in the loop's thread.

    Args:
        connections: of the leader's agents and clients.
        agents: returns the agents that are asked, with their nodes.
        summary: returns the leader's own knowledge, without the numbers of agents.
    """

    def __init__(
        self,
        connections: AgentConnections,
        agents: Callable[[], Mapping[str, str]],
        summary: Callable[[], StatusAnswer],
    ) -> None:
        self._connections, self._agents, self._summary = connections, agents, summary
        self._waiting: list[str] = []
        self._clients: tuple[str, ...] = ()
        self._number = 0
        self._open: set[str] = set()
        self._part: list[tuple[str, str]] = []
        self._complete = asyncio.Event()
        self._not_before = 0.0
        self._collecting = False

    def ask(self, client: str) -> bool:
        """Note that a client asks. Return whether `collect` has to be started.

        A client that asks while agents are being asked gets the next collection.
        """
        if client in self._waiting:
            return False
        if len(self._waiting) >= _CLIENTS:
            self._connections.send((client,), replace(self._summary(), busy=True))
            return False
        self._waiting.append(client)
        begin, self._collecting = not self._collecting, True
        return begin

    def reported(self, message: StatusReport) -> None:
        """Pass on what an agent has reported, unless its collection is over."""
        if message.request != self._number or message.agent not in self._open:
            return
        self._open.remove(message.agent)
        self._part.append((message.agent, message.report))
        if len(self._part) == _PART:
            self._flush()
        if not self._open:
            self._complete.set()

    async def collect(self) -> None:
        """Answer all clients that wait."""
        try:
            while self._waiting:
                await self._collect_once()
        finally:
            self._collecting = False

    async def _collect_once(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before - loop.time()))
        nodes = {agent: node for agent, node in self._agents().items() if self._connections.has(agent)}
        share = len(nodes) / _PER_SECOND
        self._not_before = loop.time() + max(_PAUSE, share)
        self._clients, self._waiting = tuple(self._waiting), []
        self._number += 1
        self._open, self._part = set(nodes), []
        self._complete.clear()
        names = list(nodes)
        for first in range(0, len(names), _AT_ONCE):
            self._connections.send(names[first : first + _AT_ONCE], StatusRequested(self._number))
            await asyncio.sleep(0)
        if names:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._complete.wait(), max(_LIMIT, share))
        self._flush()
        silent, self._open = self._open, set()
        answer = replace(
            self._summary(),
            asked=len(nodes),
            answered=len(nodes) - len(silent),
            silent=compress(sorted({nodes[agent] for agent in silent})[:_SILENT_NODES]),
        )
        self._connections.send(self._clients, answer)

    def _flush(self) -> None:
        if self._part:
            self._connections.send(self._clients, StatusPart(tuple(self._part)))
            self._part = []
