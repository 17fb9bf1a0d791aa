"""One process that plays thousands of agents: the product's own election machine and sessions, and no workers.

It plays as many agents as a large cluster has nodes beside one leader, so one loop around epoll carries out the actions
of the machines. What each agent does on a node of its own is done at once. The records of the run are read for all of
them together.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import math
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from benchmarks.sandbox import raise_descriptor_limit
from slurm_elastic.rendezvous.election import machine
from slurm_elastic.rendezvous.election.campaign import ElectionConfig, locate
from slurm_elastic.rendezvous.election.events import (
    Action,
    AnswerProbe,
    CloseLink,
    Connect,
    Deliver,
    Event,
    Join,
    LeaderEvent,
    LeaderLocationRead,
    LeaderLost,
    LinkClosed,
    LinkFailed,
    LinkOpened,
    ReadLeaderLocation,
    Received,
    Send,
    SendToLeader,
    Tick,
    Unreachable,
)
from slurm_elastic.rendezvous.election.leader_location import Answer, LeaderLocation
from slurm_elastic.rendezvous.election.state import initial_election
from slurm_elastic.rendezvous.membership.agents import AgentInfo, LeaveReason
from slurm_elastic.rendezvous.membership.config import Settings
from slurm_elastic.rendezvous.membership.events import Ended, Interrupted, Leaving, Left, Ponged
from slurm_elastic.rendezvous.membership.persistent import replace
from slurm_elastic.rendezvous.records.api import open_records
from slurm_elastic.rendezvous.records.etcd.config import load_config
from slurm_elastic.rendezvous.transport.messages import (
    AgentMessage,
    Assignment,
    Endpoint,
    StatusReport,
    StatusRequested,
    decode_leader_message,
    encode,
)
from slurm_elastic.rendezvous.transport.session import BusyError, ClosedError, Role, Session, SessionError
from slurm_elastic.rundir import RunDir

_CONNECT, _HANDSHAKE = 1.0, 10.0
"""Seconds that a connection may take, and the proofs on it: those of the product's transport."""
_PORT = 29399
"""On which each agent listens, at an address of its own."""
_READ, _EVENTS = 1 << 16, 1 << 15
_READ_AGAIN = 0.1
"""Seconds for which what was read of the records holds, for all agents."""
_NICE = 10
"""Increment of the nice value (nice(2)), which gives the leader nine times the share of a process of agents."""
_REPORT = 0.01
"""Seconds between two reports of the progress."""


Command = Literal["connect", "join", "mute", "leave", "kill"]
"""What agents do: connect to the leader, ask for a place, say nothing from here on (on a new connection nothing but the
proof of identity), announce their leave and go, or end as the end of their processes does."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What became of the agents of one process until now.

    Attributes:
        round: The newest round in which one of them holds a place.
        placed: The number of those that do.
        placed_at: Monotonic time at which one got its place last.
        connected: The number of times that one has connected to the leader.
        messages, bytes: Both ways; handshakes count as bytes only.
        problem: Why an agent gave up; empty if none did.
    """

    round: int = -1
    placed: int = 0
    placed_at: float = -math.inf
    connected: int = 0
    messages: int = 0
    bytes: int = 0
    problem: str = ""


def no_report(index: int) -> str:
    """Return an empty report, for benchmarks whose clients ask for none."""
    return "{}"


def play(pipe: Connection, run: str, run_dir: RunDir, expected: int, etcd: str, report: Callable[[int], str]) -> None:
    """Play agents, by the commands that come through the pipe; report their progress through it.

    Args:
        pipe: To the process that measures; this one ends with it.
        run: Run id and incarnation.
        run_dir: The run directory.
        expected: Number of agents that the run expects, in all processes.
        etcd: Where the records are; empty for the run directory.
        report: Returns what the agent on node n<index> reports to a client of the leader.
    """
    raise_descriptor_limit()
    # Each agent has a node of its own, so together they do not keep the leader from its core.
    os.nice(_NICE)
    _Herd(pipe, run, run_dir, expected, etcd, report).live()


class _Herd:
    """The agents of this process."""

    def __init__(
        self, pipe: Connection, run: str, run_dir: RunDir, expected: int, etcd: str, report: Callable[[int], str]
    ) -> None:
        self.pipe, self.run, self.secret, self.expected = pipe, run, run_dir.secret(), expected
        self.report = report
        self._records = open_records(run_dir, run, load_config(etcd) if etcd else None, limit=60.0)
        self._location, self._read_again_at = LeaderLocation(), -math.inf
        self.ended: set[str] = set()
        self.agents: dict[int, _Agent] = {}
        self.connected = self.messages = self.bytes = 0
        self.poll = select.epoll()
        self.poll.register(pipe.fileno(), select.EPOLLIN)
        self.links: dict[int, _Link] = {}
        self.listeners: dict[int, _Listener] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.placed: dict[int, int] = defaultdict(int)
        self.newest = -1
        self.placed_at = -math.inf
        self.problem = ""
        self._reported = Progress()
        self._report_at = -math.inf

    def config(self, agent: str) -> ElectionConfig:
        """Return the settings of the election of an agent."""
        settings = Settings(self.expected, self.expected, agent=agent)
        return ElectionConfig(incarnation=self.run, settings=settings, endpoints=(), has_workers=False)

    def location(self, known: LeaderLocation) -> LeaderLocation:
        """Where the records say that a leader is; `known` is the newest round of which an agent needs no record."""
        now = time.monotonic()
        if now >= self._read_again_at:
            known = max(known, self._location, key=lambda location: location.round)
            self._location = locate(self.config(""), self._records.situation(known.round), known)
            self._read_again_at = now + _READ_AGAIN
        return self._location

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Make a call then."""
        heapq.heappush(self.due, (moment, next(self.order), call))

    def live(self) -> None:
        """Let the agents live until the process that measures has ended."""
        self.pipe.send(self._reported)
        while True:
            self._report()
            now = time.monotonic()
            next_at = self.due[0][0] if self.due else math.inf
            if self._progress() != self._reported:
                next_at = min(next_at, self._report_at)
            pause = -1.0 if next_at == math.inf else max(0.0, next_at - now)
            # What was said is read before anybody judges a silence, as an agent does.
            for descriptor, _ in self.poll.poll(pause, _EVENTS):
                link = self.links.get(descriptor) or self.listeners.get(descriptor)
                if link is not None:
                    link.ready()
                elif descriptor == self.pipe.fileno():
                    try:
                        self._obey(*self.pipe.recv())
                    except EOFError:
                        return
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()

    def _obey(self, command: Command, indices: list[int]) -> None:
        for index in indices:
            match command:
                case "connect":
                    self.ended.discard(_address(index))
                    self.agents[index] = _Agent(self, index)
                    self.at(time.monotonic(), self.agents[index].connect)
                case "join":
                    self.at(time.monotonic(), self.agents[index].join)
                case "mute":
                    self.agents[index].mute = True
                case "leave" | "kill":
                    self.ended.add(_address(index))
                    if index in self.agents:
                        self.agents.pop(index).end(announced=command == "leave")

    def _progress(self) -> Progress:
        placed = self.placed[self.newest]
        return Progress(self.newest, placed, self.placed_at, self.connected, self.messages, self.bytes, self.problem)

    def _report(self) -> None:
        now, progress = time.monotonic(), self._progress()
        if now >= self._report_at and progress != self._reported:
            self.pipe.send(progress)
            self._reported, self._report_at = progress, now + _REPORT


def _address(index: int) -> str:
    """The address of an agent's node; all of 127.0.0.0/8 is the loopback."""
    return f"127.1.{index >> 8}.{index & 255}"


class _Listener:
    """Where an agent listens, as long as it lives, for a leader that looks whether its process has ended."""

    def __init__(self, herd: _Herd, address: str) -> None:
        self.herd = herd
        self.stream = socket.create_server((address, _PORT), backlog=128)
        self.stream.setblocking(False)
        herd.poll.register(self.stream.fileno(), select.EPOLLIN)
        herd.listeners[self.stream.fileno()] = self

    def ready(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.accept()[0].close()

    def close(self) -> None:
        del self.herd.listeners[self.stream.fileno()]
        self.stream.close()


class _Agent:
    """One agent: joins again at once when a round ends, as one does whose workers end quickly."""

    def __init__(self, herd: _Herd, index: int) -> None:
        self.herd, self.index = herd, index
        self.name = f"n{index}/0.0/{next(herd.order)}"
        self.listener = _Listener(herd, _address(index))
        self.candidate = AgentInfo(self.name, f"n{index}", index, 8, "default", _address(index), 29400, _PORT)
        # It never campaigns.
        self.election = replace(initial_election(herd.config(self.name), time.monotonic()), campaign_at=math.inf)
        self.links: dict[int, _Link] = {}
        self.woken = float("inf")
        self.mute = False

    def connect(self) -> None:
        self.handle(Tick())

    def join(self) -> None:
        self.handle(Join(self.candidate))

    def end(self, *, announced: bool) -> None:
        if announced:
            self.handle(SendToLeader(Leaving(self.name, LeaveReason.PREEMPTED)))
            self.handle(SendToLeader(Left(self.name, LeaveReason.PREEMPTED)))
        self.woken = -1.0
        self.listener.close()
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
                self.say(number, Ponged(self.name, probe))
            case Connect(number, (address, port), _) if port == _PORT:
                # Each of those answers on a node of its own, so the answer takes no time here.
                answer = Answer.ENDED if address in self.herd.ended else Answer.IDLE
                self.herd.at(0.0, lambda: self.handle(LinkFailed(number, answer, answer.value)))
            case Connect(number, endpoint, timeout):
                _Link(self, number, endpoint, timeout)
            case CloseLink(number):
                if number in self.links:
                    self.links[number].close()
            case ReadLeaderLocation(number, known):
                events.append(LeaderLocationRead(number, self.herd.location(known)))
            case Deliver(event):
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
                self.herd.placed_at = time.monotonic()
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
            self.herd.connected += 1
            self.agent.handle(LinkOpened(self.number, self.endpoint, session.epoch))
        for content in messages:
            self.herd.messages += 1
            message = decode_leader_message(content)
            if isinstance(message, StatusRequested):
                self.send(StatusReport(self.agent.name, message.request, self.herd.report(self.agent.index)))
            else:
                self.agent.handle(Received(self.number, message))

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
            self.herd.problem = "a leader that does not read"

    def close(self) -> None:
        if self.descriptor >= 0:
            del self.herd.links[self.descriptor]
            self.agent.links.pop(self.number, None)
            self.descriptor = -1
            self.stream.close()
