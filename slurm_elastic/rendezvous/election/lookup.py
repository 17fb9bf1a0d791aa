"""What the records say of the leader, looked up beside everything else: a file system may be slow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from slurm_elastic.rendezvous.election.leader_info import Whereabouts
from slurm_elastic.rendezvous.election.search import READ_AGAIN
from slurm_elastic.rendezvous.run_in_thread import aside

__all__ = ["Lookup"]


class Lookup:
    """Looks again and again, one time after the other.

    Attributes:
        seen: what the last look gave.
        began: the loop's time at which that look began; nothing that is older is missing in it.
    """

    def __init__(self, locate: Callable[[], Whereabouts]) -> None:
        self._locate = locate
        self.seen = Whereabouts()
        self.began = -math.inf
        self._reading: asyncio.Future[Whereabouts] | None = None
        self._reading_began = -math.inf

    async def look(self, since: float | None, *, wait: float = 0.0) -> None:
        """Take in a look that is through, and begin one if it is time for it.

        Args:
            since: a look that began before this time of the loop is too old; None if none is.
            wait: seconds for which to wait for its end.

        Raises:
            LeaderRefusedError: there will be no leader.
        """
        now = asyncio.get_running_loop().time()
        old = now >= self.began + READ_AGAIN or (since is not None and self.began < since)
        if self._reading is None and old:
            self._reading, self._reading_began = asyncio.ensure_future(aside(self._locate)), now
        if self._reading is not None and wait:
            await asyncio.wait([self._reading], timeout=wait)
        if self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            self.seen, self.began = reading.result(), self._reading_began
