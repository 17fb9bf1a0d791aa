"""The socket on which an agent leads, if it ever does, and the leader that runs on it.

The socket listens as long as the agent lives. While no leader runs here, a member of the run that connects is told so
by proof of the run's secret, and is closed. A refused connection says that the agent's process has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.election.campaign import Campaign
from slurm_elastic.rendezvous.election.events import Event, LeaderClaimed, LeaderEnded
from slurm_elastic.rendezvous.election.state import FOUNDER
from slurm_elastic.rendezvous.leader.leader import FencedError, Leader
from slurm_elastic.rendezvous.transport.listener import Listener
from slurm_elastic.rendezvous.transport.session import Session

logger = logging.getLogger(__name__)


class LeaderHost:
    """Runs the leaders of one agent. All methods are called in the loop's thread.

    Args:
        new_session: makes the listening end of a session that says that no leader runs here.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Campaign], Leader],
        new_session: Callable[[], Session],
        founder: Campaign | None,
    ) -> None:
        self._listener, self._make, self.founder, self._new_session = listener, make, founder, new_session
        self._idle: Listener | None = None
        self._serving: asyncio.Task[None] | None = None
        self.leader: Leader | None = None
        self.newest: Leader | None = None
        """The leader, also after its end."""

    def leads(self) -> bool:
        """Return whether a leader runs here whose term is its own."""
        return self.leader is not None and self.leader.membership.claimed

    async def open(self, report: Callable[[Event], None]) -> None:
        """Lead in the first term, or tell all who connect that no leader runs here."""
        self._report = report
        if self.founder is None:
            self._idle = Listener(self._listener, self._new_session)
        else:
            self.lead(FOUNDER, self.founder)
            # From here on the leader listens.
            await asyncio.sleep(0)

    def lead(self, number: int, campaign: Campaign) -> None:
        """Lead without a term until there is a quorum."""
        leader = self._make(campaign)
        before, self.leader, self.newest = self._serving, leader, leader
        leader.on_claim = lambda: self._report(LeaderClaimed(number))
        self._serving = asyncio.create_task(self._live(number, leader, before))

    def stop_leading(self) -> None:
        """Leave it to another agent to lead."""
        if self._serving is not None:
            self._serving.cancel()

    async def close(self, timeout: float) -> None:
        """Send the end of the run to all agents, wait up to `timeout` seconds until they have gone, then end."""
        leader, serving = self.leader, self._serving
        if leader is not None and serving is not None:
            all_left = asyncio.create_task(leader.wait_until_all_left())
            await asyncio.wait([all_left, serving], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            all_left.cancel()
            serving.cancel()
            await asyncio.gather(all_left, serving, return_exceptions=True)
        if self._idle is not None:
            self._idle.close()
        self._listener.close()

    async def _live(self, number: int, leader: Leader, before: asyncio.Task[None] | None) -> None:
        problem = ""
        try:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            if self._idle is not None:
                self._idle.close()
                self._idle = None
            await leader.serve(self._listener.dup())
        except FencedError as error:
            # A candidate whose term another agent has taken has led nobody.
            if leader.membership.claimed:
                logger.info("this agent leads no more: %s", error)
        except SlurmElasticError as error:
            # Such as a full disk: something for a person to fix, and no fault in here.
            problem = str(error)
        except Exception as error:
            logger.exception("the leader failed")
            problem = f"it failed: {error}"
        finally:
            if self.leader is leader:
                self.leader = None
            if self._idle is None and self._listener.fileno() >= 0:
                self._idle = Listener(self._listener, self._new_session)
        self._report(LeaderEnded(number, problem))
