"""Looks for a leader in all places where one may be, at once and again and again."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Iterable

from slurm_elastic.rendezvous.transport.client_connection import ClosedError, Link
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.session import ForeignError, SessionError, TwinError, VersionError

__all__ = ["READ_AGAIN", "Answer", "Search"]

READ_AGAIN = 0.5
"""Seconds between two looks at the records while no leader is found."""

_SOON, _LATER = 0.03, 0.5
"""Seconds from the begin of an attempt to the next one: soon, and later and later where nobody is."""
_TURN = 0.02


class Answer(enum.Enum):
    """What an attempt without success says about the other side."""

    ENDED = "nobody listens"
    """Its kernel says so: the process that listened there has ended."""
    IDLE = "leads nobody"
    """Somebody listens, and closes the connection."""
    TWIN = "leads by another directory"
    """Somebody says to lead this run, and has another secret."""
    SILENT = "no answer"
    """Or an answer from somebody who is no part of this run."""


_FOREIGN = {ClosedError: Answer.IDLE, TwinError: Answer.TWIN}


class Search:
    """One search; every place is tried by itself, so that a dead node holds up nothing.

    Attributes:
        answers: the newest answer of every place that gave one.
        problem: one line about the last place that did not help.
    """

    def __init__(self, connect: Callable[[Endpoint], Awaitable[Link]]) -> None:
        self._connect = connect
        self._tasks: dict[Endpoint, asyncio.Task[Link]] = {}
        self._began_at: dict[Endpoint, float] = {}
        self._again_at: dict[Endpoint, float] = {}
        self._pauses: dict[Endpoint, float] = {}
        self.answers: dict[Endpoint, Answer] = {}
        self.problem = "nobody listens"

    async def look(self, places: Iterable[Endpoint]) -> Link | None:
        """Look in these places for a moment; return the connection to the first that leads, None if none did yet.

        Raises:
            VersionError: a part of this run speaks another protocol.
        """
        loop = asyncio.get_running_loop()
        wanted = list(dict.fromkeys(places))
        for place in wanted:
            if place not in self._tasks and loop.time() >= self._again_at.get(place, 0.0):
                self._began_at[place] = loop.time()
                self._tasks[place] = asyncio.ensure_future(self._connect(place))
        if not self._tasks:
            await asyncio.sleep(_TURN)
            return None
        done, _ = await asyncio.wait(self._tasks.values(), timeout=_TURN, return_when=asyncio.FIRST_COMPLETED)
        found = None
        for place, task in [*self._tasks.items()]:
            if task in done:
                del self._tasks[place]
                link = self._result(place, task)
                if link is not None and (found is not None or place not in wanted):
                    link.abort()
                elif link is not None:
                    found = link
        if found is None and len(done) == len(wanted):
            # Nobody was worth waiting for.
            await asyncio.sleep(_TURN)
        return found

    def _result(self, place: Endpoint, task: asyncio.Task[Link]) -> Link | None:
        try:
            return task.result()
        except VersionError:
            raise
        except ConnectionRefusedError:
            answer = Answer.ENDED
            problem = "nobody listens"
        except ForeignError as error:
            answer = _FOREIGN.get(type(error), Answer.SILENT)
            problem = f"{place[0]}:{place[1]} is {error}"
        except (OSError, SessionError, asyncio.TimeoutError) as error:
            answer = Answer.SILENT
            problem = f"{place[0]}:{place[1]}: {error or 'no answer'}"
        self.answers[place] = answer
        self.problem = problem
        pause = _SOON if answer is Answer.IDLE else min(2 * self._pauses.get(place, _SOON / 2), _LATER)
        self._pauses[place] = pause
        self._again_at[place] = self._began_at[place] + pause
        return None

    def with_answer(self, *answers: Answer) -> frozenset[Endpoint]:
        """The places whose newest answer is one of these."""
        return frozenset(place for place, answer in self.answers.items() if answer in answers)

    async def close(self) -> None:
        """End the attempts that are under way."""
        tasks, self._tasks = [*self._tasks.values()], {}
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Link):
                with contextlib.suppress(Exception):
                    result.abort()
