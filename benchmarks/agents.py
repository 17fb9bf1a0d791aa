"""Simulated agents: the real link to the leader of each, without workers, all in one asyncio loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from benchmarks.leading import RUN, SECRET, LeaderProcess
from slurm_elastic.rendezvous.election.events import AnnounceLeave, Depart, Join, LeaderEvent, LeaderLost, Unreachable
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.election.runner import FollowerConfig, Runner
from slurm_elastic.rendezvous.election.state import ElectionConfig
from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason
from slurm_elastic.rendezvous.membership.events import Ended, Interrupted
from slurm_elastic.rendezvous.transport.messages import Assignment


class SimulatedAgent:
    """One agent: joins again at once when a round ends, as one does whose workers end quickly."""

    def __init__(self, crowd: Crowd, index: int, generation: int) -> None:
        self._crowd = crowd
        self._going = False
        agent = f"n{index}/1.0/{generation}"
        self._candidate = AgentInfo(agent, f"n{index}", index, 8, "default", f"10.0.{index >> 8}.{index & 255}", 29400)
        config = FollowerConfig(RUN, SECRET, ElectionConfig(agent), lambda known: crowd.location)
        self._runner = Runner(config, self._hear, report=lambda: crowd.report(index))
        self._task: asyncio.Task[None] | None = None

    def connect(self) -> None:
        """Begin to look for the leader."""
        self._task = asyncio.create_task(self._runner.run())

    def join(self) -> None:
        """Ask for a place."""
        self._runner.handle(Join(self._candidate))

    async def leave(self) -> None:
        """Announce the departure, go, and close the connection."""
        self._going = True
        self._runner.handle(AnnounceLeave(LeaveReason.PREEMPTED, None))
        self._runner.handle(Depart(LeaveReason.PREEMPTED, stopped=False))
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._runner.close(5.0)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _hear(self, event: LeaderEvent) -> None:
        match event:
            case Assignment():
                self._crowd.placed(event)
            case Interrupted() if not self._going:
                self.join()
            case LeaderLost() | Unreachable() | Ended():
                self._crowd.fail(f"{self._candidate.agent}: {event}")
            case _:
                pass


class Crowd:
    """The agents of one run, who know where their leader is."""

    def __init__(self, leader: LeaderProcess) -> None:
        self.location = LeaderLocation((leader.endpoint,), published=True)
        self._generation = 0
        self._ranks: dict[int, set[int]] = defaultdict(set)
        self._complete: asyncio.Queue[tuple[int, float] | str] = asyncio.Queue()
        self.agents: dict[int, SimulatedAgent] = {}
        self.report: Callable[[int], str] = lambda index: "{}"
        """Returns what the agent on node n<index> reports to a client of the leader."""

    def add(self, index: int) -> SimulatedAgent:
        """A new agent on node n<index>."""
        self._generation += 1
        self.agents[index] = SimulatedAgent(self, index, self._generation)
        return self.agents[index]

    def placed(self, placed: Assignment) -> None:
        """Note that an agent holds its rank."""
        ranks = self._ranks[placed.round]
        ranks.add(placed.place.rank)
        if len(ranks) == placed.nodes:
            del self._ranks[placed.round]
            self._complete.put_nowait((placed.nodes, asyncio.get_running_loop().time()))

    def fail(self, why: str) -> None:
        """Note that an agent gave up, which no benchmark expects."""
        self._complete.put_nowait(why)

    async def next_round(self, nodes: int, timeout: float = 120.0) -> float:
        """Wait until every agent of the next round holds its rank; the loop's time when the last one got it."""
        found = await asyncio.wait_for(self._complete.get(), timeout)
        if isinstance(found, str):
            raise RuntimeError(found)
        if found[0] != nodes:
            raise RuntimeError(f"a round of {found[0]} nodes, not {nodes}")
        return found[1]

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(agent.close() for agent in self.agents.values()))
