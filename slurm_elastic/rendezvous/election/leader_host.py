"""The place from which an agent leads, if it ever does: a listening socket, and the leader that runs on it.

The socket listens as long as the agent lives. While nobody leads from here a connection is closed at once, which tells
the other side that this agent is alive and leads nobody; a refused one says that its process has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from slurm_elastic.errors import SlurmElasticError
from slurm_elastic.rendezvous.election.policy import Vacancy
from slurm_elastic.rendezvous.leader.leader import FencedError, Leader
from slurm_elastic.rendezvous.run_in_thread import aside
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.listener import Door

__all__ = ["Chair", "Follow", "PatienceError"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"

Follow = Callable[[Vacancy], Leader]
"""Makes the leader that follows the last one, told who is gone for certain and why it is followed. May block."""


class PatienceError(Exception):
    """Somebody else is about to lead."""


class Chair:
    """One agent's chair. All methods are called in the loop's thread.

    Args:
        listener: bound and listening.
        follow: makes a leader that follows another.
        failed: told in one line why leading failed, if it did.
    """

    def __init__(self, listener: socket.socket, follow: Follow, failed: Callable[[str], None]) -> None:
        self._listener = listener
        self._follow = follow
        self._failed = failed
        self._idle: Door | None = None
        self._leading: asyncio.Task[None] | None = None
        self._complaint = ""
        self.leader: Leader | None = None

    @property
    def port(self) -> int:
        """Where this agent listens."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the leader is that runs here, None if none does. The loopback stands whatever the network does."""
        return (_LOOPBACK, self.port) if self.leader is not None else None

    def leads(self) -> bool:
        """Whether a leader runs here whose epoch is its own."""
        return self.leader is not None and self.leader.claimed.is_set()

    def stands(self) -> bool:
        """Whether a leader runs here that has no epoch yet."""
        return self.leader is not None and not self.leader.claimed.is_set()

    def in_the_way(self) -> bool:
        """See :func:`~.membership.in_the_way`."""
        return self.leader is not None and self.leader.in_the_way()

    async def open(self, leader: Leader | None) -> None:
        """Begin to lead, or to tell everybody that nobody leads from here."""
        if leader is None:
            self._idle = Door(self._listener, None)
        else:
            await self._lead(leader)

    async def stand(self, vacancy: Vacancy) -> bool:
        """Lead without an epoch until a majority is here. Returns False if that is not possible now."""
        try:
            leader = await aside(lambda: self._follow(vacancy))
        except PatienceError:
            return False
        except (SlurmElasticError, LookupError, ValueError, TypeError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("cannot stand up to lead: %s", error)
            return False
        if self.leader is None:
            await self._lead(leader)
        return True

    async def stand_down(self) -> None:
        """Leave it to somebody else."""
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)

    async def close(self, timeout: float) -> None:
        """Let the others hear the end, for at most so many seconds, and end."""
        leader, leading = self.leader, self._leading
        if leader is not None and leading is not None:
            told = asyncio.create_task(leader.everybody_told())
            await asyncio.wait([told, leading], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            leading.cancel()
            await asyncio.gather(told, leading, return_exceptions=True)
        if self._idle is not None:
            self._idle.close()
        self._listener.close()

    async def _lead(self, leader: Leader) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        self.leader = leader
        self._leading = asyncio.create_task(self._serve(leader))
        # From here on the leader listens.
        await asyncio.sleep(0)

    async def _serve(self, leader: Leader) -> None:
        try:
            await leader.serve(self._listener.dup())
        except FencedError as error:
            logger.info("this agent leads no more: %s", error)
        except SlurmElasticError as error:
            # Such as a full disk: something for a person to mend, and no fault in here.
            self._failed(str(error))
        except Exception as error:
            logger.exception("the leader failed")
            self._failed(f"it failed: {error}")
        finally:
            self.leader = None
        if self._idle is None and self._listener.fileno() >= 0:
            await self.open(None)
