"""Finds the leader of a run, and has this agent stand up where none is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from slurm_elastic.rendezvous.link import Link
from slurm_elastic.rendezvous.membership import Reason
from slurm_elastic.rendezvous.reaching import Endpoint
from slurm_elastic.rendezvous.rivals import look_for_rivals
from slurm_elastic.rendezvous.search import READ_AGAIN, Answer, Search
from slurm_elastic.rendezvous.session import VersionError
from slurm_elastic.rendezvous.succession import Successor, patience
from slurm_elastic.rendezvous.whereabouts import LeaderRefusedError, Leadership, MemberSettings, Whereabouts
from slurm_elastic.rendezvous.words import LeaderLost, Unreachable

__all__ = ["Finder"]

_RESTORE = 0.1
"""Seconds in which a broken link may be restored; as long as a leader waits for it."""
_STAND_BACK = 3.0
"""Seconds in which an agent does not stand up again after it found somebody else."""
_UNLED = 10.0
"""Seconds after which a run that nobody has ever led is led by whoever is there."""


class Finder:
    """Finds the leader. All methods are called in the loop's thread.

    Args:
        settings: of this agent.
        known: what it was told of who leads; the caller's.
        connect: tries one place.
        fence: stops the workers here, told why.
    """

    def __init__(
        self,
        settings: MemberSettings,
        known: Leadership,
        connect: Callable[[Endpoint], Awaitable[Link]],
        fence: Callable[[str], None],
    ) -> None:
        self._settings, self._known, self._connect, self._fence = settings, known, connect, fence
        self._over = False
        self._stand_again_at = 0.0
        self._rivals: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Look no more."""
        self._over = True
        if self._rivals is not None:
            self._rivals.cancel()

    async def find(self, lost: Link | None) -> Link | LeaderLost | Unreachable | None:
        """Look for a leader until there is one, be it this agent.

        Args:
            lost: the link that is of no more use; None at first.

        Returns:
            A link to it, or why there will be none; nothing after :meth:`close`.
        """
        search = Search(self._connect)
        try:
            return await self._find(search, lost)
        except (LeaderRefusedError, VersionError) as error:
            return Unreachable(str(error), usage=True)
        finally:
            await search.close()

    async def _find(self, search: Search, lost: Link | None) -> Link | LeaderLost | Unreachable | None:
        loop, known = asyncio.get_running_loop(), self._known
        began = loop.time()
        deadline = began + self._settings.connect_timeout
        old = lost.endpoint if lost is not None else None
        seen = Whereabouts()
        reading: asyncio.Future[Whereabouts] | None = None
        read_at = 0.0
        lost_at = began if known.resigned else None
        while not self._over:
            now = loop.time()
            if reading is None and now >= read_at:
                reading = asyncio.ensure_future(asyncio.to_thread(self._settings.locate))
            if reading is not None and not seen.places:
                # At first there is nothing to do but to read; later on a slow file system holds up nothing.
                await asyncio.wait([reading], timeout=_RESTORE)
            if reading is not None and reading.done():
                seen = reading.result()
                reading, read_at = None, now + READ_AGAIN
            if lost is not None and now >= began + _RESTORE:
                self._fence("the link to the leader is broken")
            order = known.order(seen)
            ended = {place for place, answer in search.answers.items() if answer is Answer.ENDED}
            idle = {place for place, answer in search.answers.items() if answer is Answer.IDLE}
            if lost_at is None:
                lost_at = self._lost_at(lost, began, seen, ended | idle)
            link = await search.look(self._places(old, seen, order, lost_at is not None or now > began + _RESTORE))
            if link is not None:
                known.resigned = False
                return link
            gone = {each.agent for each in order if (each.address, each.port) in ended}
            names = [each.agent for each in order]
            if lost_at is not None and now >= lost_at + patience(names, self._settings.agent, gone):
                newest = await asyncio.to_thread(self._settings.locate)
                if newest.published and newest.places != seen.places:
                    # Somebody leads since this agent looked last.
                    seen = newest
                    continue
                if old in ended or known.resigned:
                    gone.add(known.leader)
                await self._stand(frozenset(gone), now)
            if now > deadline:
                return LeaderLost(search.problem) if lost is not None else Unreachable(search.problem)
        return None

    def _lost_at(self, lost: Link | None, began: float, seen: Whereabouts, ended: Collection[Endpoint]) -> float | None:
        """Since when it is certain that there is no leader where there was one; None as long as it is not."""
        now = asyncio.get_running_loop().time()
        if lost is not None:
            silent = now > lost.heard_at + self._settings.leader_limit
            return now if lost.endpoint in ended or silent else None
        if not seen.published:
            return now if self._settings.stand is not None and now > began + _UNLED else None
        gone = all(place in ended for place in seen.places)
        return now if gone or now > began + self._settings.leader_limit else None

    def _places(
        self, old: Endpoint | None, seen: Whereabouts, order: Sequence[Successor], lost: bool
    ) -> list[Endpoint]:
        own = self._settings.own()
        if own is not None:
            return [own]
        places = [place for place in seen.places if place != self._known.left]
        if old is not None and old != self._known.left:
            places.insert(0, old)
        if lost:
            places += [(each.address, each.port) for each in order if each.agent != self._settings.agent]
        return places

    async def _stand(self, gone: frozenset[str], now: float) -> None:
        stand = self._settings.stand
        if stand is None or now < self._stand_again_at:
            return
        self._stand_again_at = now + 1.0
        if await stand(gone, Reason.NODE_LEFT if self._known.resigned else Reason.NODE_LOST):
            self._rivals = asyncio.create_task(self._stand_back_for_rivals())

    async def _stand_back_for_rivals(self) -> None:
        if await look_for_rivals(self._settings, self._known, self._connect):
            # Time to get there before this agent thinks of itself again.
            self._stand_again_at = asyncio.get_running_loop().time() + _STAND_BACK
            standing, stand_down = self._settings.standing, self._settings.stand_down
            if stand_down is not None and standing is not None and standing():
                await stand_down()
