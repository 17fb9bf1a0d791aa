"""An agent that stands to lead looks for somebody who leads, or who should rather."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slurm_elastic.rendezvous.election.leader_info import LeaderRefusedError, Leadership, MemberSettings
from slurm_elastic.rendezvous.election.policy import IN_THE_WAY
from slurm_elastic.rendezvous.election.search import READ_AGAIN, Search
from slurm_elastic.rendezvous.run_in_thread import aside
from slurm_elastic.rendezvous.transport.client_connection import Link
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.session import SessionError

__all__ = ["look_for_rivals"]

logger = logging.getLogger(__name__)


async def look_for_rivals(
    settings: MemberSettings, known: Leadership, connect: Callable[[Endpoint], Awaitable[Link]]
) -> bool:
    """While this agent stands without an epoch of its own, find out whether it had better not.

    Somebody else may lead, or be ahead of it; or it may be in the way of others.

    Args:
        settings: of this agent.
        known: what it was told of who leads.
        connect: tries one place.

    Returns:
        Whether that is so; then it is this agent that stands back.
    """
    search = Search(connect)
    loop = asyncio.get_running_loop()
    in_the_way_since: float | None = None
    try:
        while (standing := settings.standing) is not None and standing():
            seen = await aside(settings.locate)
            order = known.order(seen)
            names = [each.agent for each in order]
            ahead = order[: names.index(settings.agent)] if settings.agent in names else order
            places = [*seen.places, *((each.address, each.port) for each in ahead)]
            if known.place is not None:
                # The last leader is no successor of its own. It may have come back too late to lead, and stand as well.
                places.append(known.place)
            until = loop.time() + READ_AGAIN
            while standing() and loop.time() < until:
                others = {known.left, *settings.addresses()}
                link = await search.look(place for place in places if place not in others)
                if link is not None:
                    link.abort()
                    return True
                if not settings.in_the_way():
                    in_the_way_since = None
                elif in_the_way_since is None:
                    in_the_way_since = loop.time()
                elif loop.time() >= in_the_way_since + IN_THE_WAY:
                    return True
    except (SessionError, LeaderRefusedError):
        logger.debug("looking for another leader ended", exc_info=True)
    finally:
        await search.close()
    return False
