"""Finds the leader of a run, and has this agent stand up where none is found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from slurm_elastic.rendezvous.election.leader_info import LeaderRefusedError, Leadership, MemberSettings, Whereabouts
from slurm_elastic.rendezvous.election.lookup import Lookup
from slurm_elastic.rendezvous.election.policy import Successor, Vacancy, patience
from slurm_elastic.rendezvous.election.rivals import look_for_rivals
from slurm_elastic.rendezvous.election.search import Answer, Search
from slurm_elastic.rendezvous.leader_events import LeaderLost, Unreachable
from slurm_elastic.rendezvous.membership import Reason
from slurm_elastic.rendezvous.transport.client_connection import Link
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.session import VersionError

__all__ = ["Finder"]

logger = logging.getLogger(__name__)

_RESTORE = 0.1
"""Seconds in which a broken link may be restored; as long as a leader waits for it."""
_STAND_BACK = 3.0
"""Seconds in which an agent does not stand up again after it found somebody else."""
_UNLED = 10.0
"""Seconds after which a run that nobody has ever led is led by whoever is there."""


def _twin(places: Collection[Endpoint]) -> str:
    where = ", ".join(sorted(f"{address}:{port}" for address, port in places))
    return (
        f"a run of this id is led from {where} by another run directory; give one that all nodes share by --run-dir, or"
        " another --run-id"
    )


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
        self._twins: frozenset[Endpoint] = frozenset()
        self._stand_again_at = 0.0
        self._rising: asyncio.Task[None] | None = None
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
            if self._rising is not None:
                # Whoever has found a leader does not stand, however long the records take.
                self._rising.cancel()
                self._rising = None
            await search.close()

    async def _find(self, search: Search, lost: Link | None) -> Link | LeaderLost | Unreachable | None:
        loop, known = asyncio.get_running_loop(), self._known
        began = loop.time()
        old = lost.endpoint if lost is not None else None
        records = Lookup(self._settings.locate)
        lost_at = began if known.resigned else None
        while not self._over:
            # Where nobody is known there is nothing to do but to read.
            await records.look(lost_at, wait=_RESTORE if lost is None and not records.seen.places else 0.0)
            now, seen = loop.time(), records.seen
            if lost is not None and now >= began + _RESTORE:
                self._fence("the link to the leader is broken")
            order = known.order(seen)
            if lost_at is None:
                lost_at = self._lost_at(lost, began, seen, search)
            link = await search.look(self._places(old, seen, order, lost_at is not None or now > began + _RESTORE))
            if link is not None:
                known.resigned = False
                if self._settings.own() is not None and link.endpoint not in self._settings.addresses():
                    # An agent that stands since a moment would go by itself again with the next break of this link.
                    await self._stand_down()
                return link
            ended = search.with_answer(Answer.ENDED)
            gone = {each.agent for each in order if (each.address, each.port) in ended} | known.gone
            names = [each.agent for each in order]
            # Somebody may lead since an earlier look.
            if (
                lost_at is not None
                and now >= lost_at + patience(names, self._settings.agent, gone, known.leaving)
                and (records.began >= lost_at)
            ):
                self._rise(self._vacancy(lost, gone, ended), now)
            if now > began + self._settings.connect_timeout:
                return LeaderLost(search.problem) if lost is not None else self._unreachable(seen, search)
        return None

    def _lost_at(self, lost: Link | None, began: float, seen: Whereabouts, search: Search) -> float | None:
        """Since when it is certain that there is no leader where there was one; None as long as it is not."""
        now, ended = asyncio.get_running_loop().time(), search.with_answer(Answer.ENDED, Answer.IDLE)
        if lost is not None:
            return now if lost.endpoint in ended or self._is_silent(lost) else None
        if not seen.published:
            if now <= began + _UNLED or self._settings.stand is None:
                return None
            # To lead the same run a second time is the last thing to do, also when the other one is silent for once or
            # has finished it.
            twins = search.with_answer(Answer.TWIN)
            if twins and not self._twins:
                logger.warning("%s", _twin(twins))
            self._twins |= twins
            return None if self._twins else now
        gone = all(place in ended for place in seen.places)
        return now if gone or now > began + self._settings.leader_limit else None

    def _unreachable(self, seen: Whereabouts, search: Search) -> Unreachable:
        if self._twins and not seen.published:
            return Unreachable(_twin(self._twins), usage=True)
        return Unreachable(search.problem)

    def _vacancy(self, lost: Link | None, gone: set[str], ended: Collection[Endpoint]) -> Vacancy:
        known, silent = self._known, frozenset[str]()
        if known.resigned or (lost is not None and lost.endpoint in ended):
            gone = gone | {known.leader}
        elif lost is not None and self._is_silent(lost):
            silent = frozenset({known.leader})
        return Vacancy(Reason.NODE_LEFT if known.resigned else Reason.NODE_LOST, frozenset(gone), silent, known.round)

    def _is_silent(self, lost: Link) -> bool:
        return asyncio.get_running_loop().time() > lost.heard_at + self._settings.leader_limit

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

    def _rise(self, vacancy: Vacancy, now: float) -> None:
        if self._rising is not None and self._rising.done():
            self._rising.result()
            self._rising = None
        if self._rising is None and now >= self._stand_again_at and self._settings.stand is not None:
            self._stand_again_at = now + 1.0
            self._rising = asyncio.create_task(self._stand(self._settings.stand, vacancy))

    async def _stand(self, stand: Callable[[Vacancy], Awaitable[bool]], vacancy: Vacancy) -> None:
        try:
            await stand(vacancy)
        finally:
            # Also when somebody was found in this very moment.
            if self._settings.standing is not None and self._settings.standing():
                self._rivals = asyncio.create_task(self._stand_back_for_rivals())

    async def _stand_back_for_rivals(self) -> None:
        if await look_for_rivals(self._settings, self._known, self._connect):
            await self._stand_down()

    async def _stand_down(self) -> None:
        standing, stand_down = self._settings.standing, self._settings.stand_down
        if stand_down is not None and standing is not None and standing():
            # Time to get there before this agent thinks of itself again.
            self._stand_again_at = asyncio.get_running_loop().time() + _STAND_BACK
            await stand_down()
