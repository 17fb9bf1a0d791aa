"""The thread in which an agent's link to the leader lives, and on the leading agent the leader itself.

The agent's main thread sends through :class:`Coordination` and receives by :meth:`Coordination.next_event` or by
waiting for :attr:`Coordination.fd`, so it never blocks on the network.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from slurm_elastic.errors import RecordsError
from slurm_elastic.rendezvous.election import events
from slurm_elastic.rendezvous.election.runner import Deliver, Positions, Runner
from slurm_elastic.rendezvous.leader.agent_connections import Ration
from slurm_elastic.rendezvous.membership.agents import AgentInfo
from slurm_elastic.rendezvous.membership.state import Phase
from slurm_elastic.rendezvous.records.api import Records
from slurm_elastic.rendezvous.transport.messages import AgentMessage, Successor
from slurm_elastic.text import printable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Led:
    """The agents of a run, as its leader knows them.

    Attributes:
        staying: Agents that have announced no leave.
        ending: True if the run is ending: workers have ended well, or it is closed.
    """

    epoch: int
    staying: tuple[str, ...]
    ending: bool = False


class Coordination:
    """An agent's side of the membership, for use from its main thread.

    Args:
        make_runner: Makes the runner, in the thread.
        standby_port: The port on which this agent listens.
    """

    def __init__(
        self,
        make_runner: Callable[[Deliver, Positions, Callable[[], str]], Runner],
        records: Records,
        standby_port: int,
    ) -> None:
        self._make_runner, self._records, self._standby_port = make_runner, records, standby_port
        self._events: queue.SimpleQueue[events.LeaderEvent | events.RecordsLost] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Readable while events wait; for use in a selector."""
        self.positions: Positions = lambda _dumps: ()
        """Called in the thread when a worker of any agent has failed."""
        self.report: Callable[[], str] = lambda: "{}"
        """Returns what this agent does now as JSON, in the thread, when a client of the leader asks; see
        :class:`~.messages.StatusReport`."""
        self._ready = Future[None]()
        self._stopped = self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="slurm-elastic-coordination", daemon=True)

    def start(self) -> None:
        """Start the thread; the leader, if it is here, listens from now on.

        Raises:
            OSError: The thread cannot serve, as without a descriptor that is left.
        """
        self._records.on_loss(self._records_lost)
        self._thread.start()
        self._ready.result()

    def next_event(self, timeout: float | None = None) -> events.LeaderEvent | events.RecordsLost | None:
        """Return the next event, or None if none came within `timeout` seconds (0: do not wait, None: for ever)."""
        try:
            event = self._events.get(block=timeout != 0, timeout=timeout or None)
        except queue.Empty:
            return None
        os.eventfd_read(self.fd)
        return event

    @property
    def has_event(self) -> bool:
        """Return whether :meth:`next_event` has one to give at once."""
        return not self._events.empty()

    @property
    def leads(self) -> bool:
        """Return whether this agent leads the run, or did until it stopped."""
        return self._led if self._stopped else self._runner.leads()

    def led(self, ended: bool) -> Led | None:
        """Return the agents of the run if this agent leads it now, or if `ended` did last; from any thread."""
        leader = self._runner.newest if ended else self._runner.leader
        if leader is None or not leader.membership.claimed:
            return None
        state = leader.membership
        here = (agent for agent in state.agents.values() if not agent.departed and agent.leave_reason is None)
        return Led(
            leader.epoch,
            tuple(agent.candidate.agent for agent in here),
            state.phase is Phase.CLOSED or state.finished > 0 or state.resigning,
        )

    def join(self, candidate: AgentInfo) -> None:
        """Ask for an assignment; no workers run here."""
        self._post(events.Join(dataclasses.replace(candidate, standby_port=self._standby_port)))

    def send(self, message: AgentMessage) -> None:
        """Send a message to the leader; see :class:`.events.SendToLeader`."""
        self._post(events.SendToLeader(message))

    def _records_lost(self, error: RecordsError) -> None:
        # Any thread may call this, also after the end.
        with self._closing:
            if not self._closed:
                self._deliver(events.RecordsLost(str(error)))

    def leader_address(self) -> str:
        """See :meth:`.Runner.leader_address`."""
        return self._runner.leader_address()

    def known_members(self) -> tuple[Successor, ...]:
        """See :meth:`.Runner.known_members`."""
        return self._runner.known_members()

    def rejected(self) -> int:
        """Return how many records of strangers the leader here has dropped; 0 where none leads."""
        leader = self._runner.leader
        return leader.connections.drops.count if leader is not None else 0

    def stop(self, timeout: float = 5.0) -> None:
        """Send all queued messages; on the leader's agent, wait for the other agents to leave; then end the thread.

        A second call does nothing.

        Args:
            timeout: Seconds to wait for the messages, and as many for the other agents.
        """
        if self._stopped:
            return
        self._led = self._runner.leads()
        self._stopped = True
        self._call(lambda: self._stopping.set_result(timeout))
        self._thread.join(2 * timeout + 1)
        if not self._thread.is_alive():
            with self._closing:
                self._closed = True
                os.close(self.fd)

    def _post(self, event: events.Event) -> None:
        self._call(lambda: self._runner.handle(event))

    def _call(self, action: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            logger.debug("the coordination thread has ended")

    def _deliver(self, event: events.LeaderEvent | events.RecordsLost) -> None:
        # The reader takes the event first and counts down then, so the count has to be there before the event.
        os.eventfd_write(self.fd, 1)
        self._events.put(event)

    def _main(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(FaultLog())
        self._stopping: asyncio.Future[float] = self._loop.create_future()
        self._runner = self._make_runner(self._deliver, lambda dumps: self.positions(dumps), lambda: self.report())
        await self._runner.open()
        self._ready.set_result(None)
        timeout = await self._stopping
        await self._runner.close(timeout)
        # Waits in other threads would hold up the end of this one.
        self._records.stop_waiting()
        # An attempt to connect that fails while it is cancelled is no news; asyncio.run would tell it with a traceback.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class FaultLog:
    """Logs exceptions that no caller takes, as the exception handler of a loop: one traceback per minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._ration = Ration(1, clock)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """See asyncio.loop.set_exception_handler."""
        left_out = self._ration.take()
        if left_out is not None:
            more = f" ({left_out} more since the last line)" if left_out else ""
            logger.error("%s%s", printable(context["message"]), more, exc_info=context.get("exception"))
