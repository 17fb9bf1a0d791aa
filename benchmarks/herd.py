"""Thousands of agents in one process: the product's own election machine and sessions, and no workers.

:mod:`benchmarks.agents` runs the product's runner too, with tasks for each agent. Here one process plays as many agents
as a large cluster has nodes beside one leader, so one loop around epoll carries out the actions of the machines. What
each agent does on a node of its own is done at once. The records of the run are read for all of them together.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slurm_elastic.rendezvous.election import machine
from slurm_elastic.rendezvous.election.actions import (
    Action,
    AnswerProbe,
    CancelConnect,
    CloseLink,
    Connect,
    Deliver,
    ReadLeaderLocation,
    Send,
    StopWorkers,
)
from slurm_elastic.rendezvous.election.attempts import Answer
from slurm_elastic.rendezvous.election.events import (
    Event,
    Join,
    LeaderLocationRead,
    LinkClosed,
    LinkFailed,
    LinkOpened,
    Received,
    Tick,
)
from slurm_elastic.rendezvous.election.leader_location import LeaderLocation
from slurm_elastic.rendezvous.election.state import ElectionConfig, initial_election
from slurm_elastic.rendezvous.leader_client import find_leader
from slurm_elastic.rendezvous.leader_events import LeaderEvent, LeaderLost, Unreachable
from slurm_elastic.rendezvous.membership import AgentInfo, Ponged
from slurm_elastic.rendezvous.transport.connect import Endpoint
from slurm_elastic.rendezvous.transport.messages import (
    AgentMessage,
    Assignment,
    Ended,
    Interrupted,
    decode_leader_message,
    encode,
)
from slurm_elastic.rendezvous.transport.session import BusyError, ClosedError, Role, Session, SessionError
from slurm_elastic.rundir import RunDir

__all__ = ["Herd", "NotReachedError", "Traffic"]

_CONNECT, _HANDSHAKE = 1.0, 10.0
"""Seconds that a connection may take, and the proofs on it: those of the product's transport."""
_READ, _EVENTS = 1 << 16, 1 << 15
_READ_AGAIN = 0.1
"""Seconds for which what was read of the records holds, for all agents."""


class NotReachedError(Exception):
    """What a row waits for did not come about in time, or an agent gave up."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and bytes of all agents, both ways; handshakes count as bytes only."""

    messages: int = 0
    bytes: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages - other.messages, self.bytes - other.bytes)


class Herd:
    """The agents of one run.

    Args:
        run: Run id and incarnation.
        run_dir: The run directory, which has the records.
    """

    def __init__(self, run: str, run_dir: RunDir) -> None:
        self.run, self.secret = run, run_dir.secret()
        self._run_dir = run_dir
        self._location, self._read_again_at = LeaderLocation(), -math.inf
        self.agents: dict[int, _Agent] = {}
        self.messages = self.bytes = 0
        self.poll = select.epoll()
        self.links: dict[int, _Link] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.placed: dict[int, int] = defaultdict(int)
        self.newest = -1
        self.problem = ""

    def add(self, index: int, generation: int) -> None:
        """A new agent on node n<index>, which connects and joins with the next :meth:`wait`."""
        agent = self.agents[index] = _Agent(self, index, generation)
        self.at(time.monotonic(), agent.start)

    def mute(self, indices: Iterable[int]) -> None:
        """Let agents say nothing from here on; what comes after the proof of identity on a new connection, too."""
        for index in indices:
            self.agents[index].mute = True

    def kill(self, indices: Iterable[int]) -> None:
        """End agents as the end of their processes does."""
        for index in indices:
            self.agents.pop(index).kill()

    def traffic(self) -> Traffic:
        """What was said until now."""
        return Traffic(self.messages, self.bytes)

    def location(self) -> LeaderLocation:
        """Where the records say that a leader is."""
        now = time.monotonic()
        if now >= self._read_again_at:
            leader = find_leader(self._run_dir)
            self._location = LeaderLocation(((leader.address, leader.port),), published=True)
            self._read_again_at = now + _READ_AGAIN
        return self._location

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Make a call then."""
        heapq.heappush(self.due, (moment, next(self.order), call))

    def wait(self, done: Callable[[], bool], timeout: float) -> float:
        """Let the agents live until `done`; the seconds that this took.

        Raises:
            NotReachedError: not in time, or an agent gave up.
        """
        begin = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > begin + timeout:
                raise NotReachedError(f"not within {timeout:.0f} s")
            self._live(now, begin + timeout)
            if self.problem:
                raise NotReachedError(self.problem)
        return time.monotonic() - begin

    def rest(self, seconds: float) -> None:
        """Let the agents live for so long."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until, seconds + 60.0)

    def hold_places(self, agents: int, after: int) -> Callable[[], bool]:
        """Whether so many agents hold a place in one round that is newer than `after`."""
        return lambda: self.newest > after and self.placed[self.newest] >= agents

    def close(self) -> None:
        """End all."""
        self.kill([*self.agents])
        self.poll.close()

    def _live(self, now: float, until: float) -> None:
        next_at = min(self.due[0][0] if self.due else until, until)
        # What was said is read before anybody judges a silence, as an agent does.
        for descriptor, _ in self.poll.poll(max(0.0, next_at - now), _EVENTS):
            link = self.links.get(descriptor)
            if link is not None:
                link.ready()
        now = time.monotonic()
        while self.due and self.due[0][0] <= now:
            heapq.heappop(self.due)[2]()


class _Agent:
    """One agent: joins again at once when a round ends, as one does whose workers end quickly."""

    def __init__(self, herd: Herd, index: int, generation: int) -> None:
        self.herd = herd
        self.name = f"n{index}/0.0/{generation}"
        # Nobody listens at the last address: the kernel refuses, as it does where an agent has ended.
        self.candidate = AgentInfo(self.name, f"n{index}", index, 8, "default", "127.0.0.1", 29400, 1)
        self.election = initial_election(ElectionConfig(self.name), time.monotonic())
        self.links: dict[int, _Link] = {}
        self.woken = float("inf")
        self.mute = False

    def start(self) -> None:
        self.handle(Join(self.candidate))
        self.handle(Tick())

    def kill(self) -> None:
        self.woken = -1.0
        for link in [*self.links.values()]:
            link.close()

    def handle(self, event: Event) -> None:
        if self.woken < 0:
            return
        events = [event]
        now = time.monotonic()
        while events:
            self.election, actions = machine.step(self.election, events.pop(0), now)
            for action in actions:
                self.act(action, events)
        deadline = self.election.deadline
        if deadline < self.woken:
            self.woken = deadline
            self.herd.at(deadline, self.wake)

    def wake(self) -> None:
        if self.woken < 0:
            return
        self.woken = float("inf")
        if self.election.deadline <= time.monotonic():
            self.handle(Tick())
        elif self.election.deadline < self.woken:
            self.woken = self.election.deadline
            self.herd.at(self.woken, self.wake)

    def act(self, action: Action, events: list[Event]) -> None:
        match action:
            case Send(number, message):
                self.say(number, message)
            case AnswerProbe(number, probe):
                self.say(number, Ponged(self.name, probe, None))
            case Connect(number, endpoint, timeout):
                _Link(self, number, endpoint, timeout)
            case CancelConnect(number) | CloseLink(number):
                if number in self.links:
                    self.links[number].close()
            case ReadLeaderLocation(number):
                events.append(LeaderLocationRead(number, self.herd.location()))
            case Deliver(event) | StopWorkers(event):
                self.hear(event, events)
            case _:
                pass

    def say(self, number: int, message: AgentMessage) -> None:
        if number in self.links and not self.mute:
            self.links[number].send(message)

    def hear(self, event: LeaderEvent, events: list[Event]) -> None:
        match event:
            case Assignment(round=number):
                self.herd.placed[number] += 1
                self.herd.newest = max(self.herd.newest, number)
            case Interrupted():
                events.append(Join(self.candidate))
            case LeaderLost() | Unreachable() | Ended():
                self.herd.problem = f"{self.name}: {event}"
            case _:
                pass


class _Link:
    """One connection of an agent, from its first packet on."""

    def __init__(self, agent: _Agent, number: int, endpoint: Endpoint, timeout: float | None) -> None:
        self.agent, self.number, self.endpoint = agent, number, endpoint
        self.herd = agent.herd
        self.session: Session | None = None
        self.stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.descriptor = self.stream.fileno()
        agent.links[number] = self
        self.herd.links[self.descriptor] = self
        self.limit = timeout
        self.patience(_CONNECT)
        error = self.stream.connect_ex(endpoint)
        if error in (0, errno.EINPROGRESS):
            self.herd.poll.register(self.descriptor, select.EPOLLOUT)
        else:
            self.later(Answer.SILENT)

    def patience(self, seconds: float) -> None:
        seconds = seconds if self.limit is None else min(seconds, self.limit)
        stage = self.session
        self.herd.at(time.monotonic() + seconds, lambda: self.too_late(stage))

    def too_late(self, stage: Session | None) -> None:
        if self.session is stage and self.descriptor >= 0 and not (stage is not None and stage.established):
            self.fail(Answer.SILENT)

    def later(self, answer: Answer) -> None:
        """Fail, but not within the step of the machine that has asked for this."""
        self.herd.at(0.0, lambda: self.fail(answer) if self.descriptor >= 0 else None)

    def fail(self, answer: Answer, busy: float = 0.0) -> None:
        self.close()
        self.agent.handle(LinkFailed(self.number, answer, answer.value, busy))

    def ready(self) -> None:
        if self.session is None:
            self.connected()
            return
        try:
            data = self.stream.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.ended()
            return
        self.herd.bytes += len(data)
        self.take(self.session, data)

    def connected(self) -> None:
        error = self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.fail(Answer.ENDED if error == errno.ECONNREFUSED else Answer.SILENT)
            return
        herd = self.herd
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session = Session(Role.AGENT, herd.secret, herd.run, agent=self.agent.name)
        self.session.port = self.endpoint[1]
        herd.poll.modify(self.descriptor, select.EPOLLIN)
        self.write(self.session.start())
        self.patience(_HANDSHAKE)

    def ended(self) -> None:
        if self.session is not None and self.session.established:
            self.close()
            self.agent.handle(LinkClosed(self.number))
        else:
            self.fail(Answer.SILENT)

    def take(self, session: Session, data: bytes) -> None:
        before = session.established
        try:
            messages, answer = session.receive(data)
        except BusyError as error:
            self.fail(Answer.SILENT, error.seconds)
            return
        except ClosedError:
            self.fail(Answer.IDLE)
            return
        except SessionError:
            self.ended()
            return
        if answer:
            self.write(answer)
        if session.established and not before:
            self.agent.handle(LinkOpened(self.number, self.endpoint, session.epoch))
        for content in messages:
            self.herd.messages += 1
            self.agent.handle(Received(self.number, decode_leader_message(content)))

    def send(self, message: AgentMessage) -> None:
        if self.descriptor >= 0 and self.session is not None:
            self.herd.messages += 1
            self.write(self.session.seal(encode(message)))

    def write(self, data: bytes) -> None:
        self.herd.bytes += len(data)
        try:
            sent = self.stream.send(data)
        except OSError:
            # The end of the connection is readable as well.
            return
        if sent != len(data):
            raise NotReachedError("a leader that does not read")

    def close(self) -> None:
        if self.descriptor >= 0:
            del self.herd.links[self.descriptor]
            self.agent.links.pop(self.number, None)
            self.descriptor = -1
            self.stream.close()
