"""The thread in which an agent's link to the leader lives, and on the leading agent the leader itself.

The agent's main thread speaks through :class:`Coordination` and listens by :meth:`Coordination.next_word` or by
waiting for :attr:`Coordination.fd`, so it never blocks on the network.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable

from slurm_elastic.rendezvous.election.follower_link import Member
from slurm_elastic.rendezvous.election.leader_host import Chair, Follow
from slurm_elastic.rendezvous.election.leader_info import MemberSettings
from slurm_elastic.rendezvous.election.policy import Successor
from slurm_elastic.rendezvous.leader.leader import Leader
from slurm_elastic.rendezvous.leader_events import LeaderLost, RecordsLost, Word
from slurm_elastic.rendezvous.membership import Candidate, LeaveReason, Slowest, WorkerFailure
from slurm_elastic.rendezvous.records.api import RecordsError

__all__ = ["Coordination", "RecordsLost"]

logger = logging.getLogger(__name__)


class Coordination:
    """An agent's side of the membership, for use from its main thread.

    Args:
        settings: of the link to the leader.
        listener: bound and listening, where this agent leads if it does.
        follow: makes the leader that follows another one, if this agent has to be it.
        leader: the one to begin with, on the agent that leads the first epoch.
        release: ends all waits in other threads that would hold up the end of this one.
    """

    def __init__(
        self,
        settings: MemberSettings,
        listener: socket.socket,
        follow: Follow,
        leader: Leader | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._listener, self._follow, self._leader = listener, follow, leader
        self._release = release
        self._standby_port: int = listener.getsockname()[1]
        self._words: queue.SimpleQueue[Word | RecordsLost] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Readable while words wait; for use in a selector."""
        self.slowest: Callable[[], Slowest | None] = lambda: None
        """Says how far the workers here are, in the thread, when a worker somewhere has failed."""
        self._ready = threading.Event()
        self._stopped = self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="slurm-elastic-coordination", daemon=True)

    def start(self) -> None:
        """Start the thread; the leader, if it is here, listens from now on."""
        self._thread.start()
        self._ready.wait()

    def next_word(self, timeout: float | None = None) -> Word | RecordsLost | None:
        """The leader's next word, or None if none came within `timeout` seconds (0: do not wait, None: for ever)."""
        try:
            word = self._words.get(block=timeout != 0, timeout=timeout or None)
        except queue.Empty:
            return None
        os.eventfd_read(self.fd)
        return word

    @property
    def has_word(self) -> bool:
        """Whether :meth:`next_word` has one to give at once."""
        return not self._words.empty()

    @property
    def leads(self) -> bool:
        """Whether this agent leads the run, or did until it stopped."""
        return self._led if self._stopped else self._chair.leads()

    def join(self, candidate: Candidate) -> None:
        """See :meth:`Member.join`."""
        candidate = dataclasses.replace(candidate, standby_port=self._standby_port)
        self._post(lambda: self._member.join(candidate))

    def leaving(self, reason: LeaveReason, seconds: float | None = None) -> None:
        """See :meth:`Member.leaving`."""
        self._post(lambda: self._member.leaving(reason, seconds))

    def held(self, round_: int, step: int | None) -> None:
        """See :meth:`Member.held`."""
        self._post(lambda: self._member.held(round_, step))

    def left(self, reason: LeaveReason, *, stopped: bool = False) -> None:
        """See :meth:`Member.left`."""
        self._post(lambda: self._member.left(reason, stopped=stopped))

    def worker_failed(self, failure: WorkerFailure) -> None:
        """See :meth:`Member.worker_failed`."""
        self._post(lambda: self._member.worker_failed(failure))

    def finished(self) -> None:
        """See :meth:`Member.finished`."""
        self._post(lambda: self._member.finished())

    def request_leave(self, job: str, reason: LeaveReason, seconds: float | None, detail: str) -> None:
        """See :meth:`Member.request_leave`."""
        self._post(lambda: self._member.request_leave(job, reason, seconds, detail))

    def close_run(self) -> None:
        """See :meth:`Member.close_run`."""
        self._post(lambda: self._member.close_run())

    def records_lost(self, error: RecordsError) -> None:
        """The store of the records is given up for lost. May be called from any thread, also after the end."""
        with self._closing:
            if not self._closed:
                self._deliver(RecordsLost(str(error)))

    def leader_address(self) -> str:
        """See :meth:`Member.leader_address`."""
        return self._member.leader_address()

    def members_told(self) -> tuple[Successor, ...]:
        """See :meth:`Member.members_told`."""
        return self._member.members_told()

    def rejected(self) -> int:
        """How many records of strangers the leader here has dropped; 0 where none leads."""
        leader = self._chair.leader
        return sum(leader.rejected.values()) if leader is not None else 0

    def stop(self, timeout: float = 5.0) -> None:
        """Let what was said go out; on the leader's agent, let the others go first; then end the thread.

        Called again, it does nothing.
        """
        if self._stopped:
            return
        self._led = self._chair.leads()
        self._stopped = True
        self._post(lambda: self._stopping.set_result(timeout))
        self._thread.join(2 * timeout + 1)
        if not self._thread.is_alive():
            with self._closing:
                self._closed = True
                os.close(self.fd)

    def _post(self, action: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            logger.debug("the coordination thread has ended")

    def _deliver(self, word: Word | RecordsLost) -> None:
        # The reader takes the word first and counts down then, so the count has to be there before the word.
        os.eventfd_write(self.fd, 1)
        self._words.put(word)

    def _main(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping: asyncio.Future[float] = self._loop.create_future()
        chair = self._chair = Chair(self._listener, self._follow, lambda why: self._deliver(LeaderLost(why)))
        settings = dataclasses.replace(
            self._settings,
            own=lambda: chair.endpoint,
            stand=chair.stand,
            standing=chair.stands,
            in_the_way=chair.in_the_way,
            stand_down=chair.stand_down,
        )
        self._member = Member(settings, self._deliver, lambda: self.slowest())
        await chair.open(self._leader)
        self._ready.set()
        following = asyncio.create_task(self._member.run())
        following.add_done_callback(self._report)
        timeout = await self._stopping
        await self._member.close(timeout)
        following.cancel()
        await chair.close(timeout)
        self._release()
        # An attempt to connect that fails while it is cancelled is no news; asyncio.run would tell it with a traceback.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("the link to the leader failed", exc_info=task.exception())
            self._deliver(LeaderLost(f"the link to it failed: {task.exception()}"))
