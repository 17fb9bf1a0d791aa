"""Collects the reports of all agents for clients that ask what the run does now.

The cost for the leader is bounded, whatever the number of clients and requests: one message to and from each agent per
collection, collections so far apart that they cost no more than heartbeats, and at most `_CLIENTS` clients that wait.
The leader keeps no report: it passes on parts as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from slurm_elastic.rendezvous.leader.agent_connections import AgentConnections
from slurm_elastic.rendezvous.transport.messages import StatusAnswer, StatusPart, StatusReport, StatusRequested
from slurm_elastic.slurm import compress

_CLIENTS = 16
"""Clients of one collection; further ones get the answer that the leader is busy."""
_LIMIT = 1.5
"""Seconds in which agents have to report; where they are many, the pause between two collections."""
_PER_SECOND = 512
"""Agents that the leader asks per second, on average over collections; it sends as many heartbeats."""
_PAUSE = 1.0
"""Least seconds between the starts of two collections."""
_AT_ONCE = 64
"""Agents that the leader asks before it serves its connections again."""
_PART = 32
"""Reports in one message: at most 256 KiB of the 1 MiB that a message may have."""
_SILENT_NODES = 4096
"""Most nodes that the list of silent nodes names."""


class StatusCollector:
    """The collections of one leader, one at a time. Call all methods in the loop's thread."""

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
        self._collecting = asyncio.Lock()

    async def ask(self, client: str) -> None:
        """Answer a client. One that asks during a collection gets the next one, with all others that wait."""
        if client in self._waiting:
            return
        if len(self._waiting) >= _CLIENTS:
            self._connections.send((client,), replace(self._summary(), busy=True))
            return
        self._waiting.append(client)
        async with self._collecting:
            if client in self._waiting:
                await self._collect()

    def reported(self, message: StatusReport) -> None:
        """Pass on the report of an agent, unless its collection is over."""
        if message.request != self._number or message.agent not in self._open:
            return
        self._open.remove(message.agent)
        self._part.append((message.agent, message.report))
        if len(self._part) == _PART:
            self._flush()
        if not self._open:
            self._complete.set()

    async def _collect(self) -> None:
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
