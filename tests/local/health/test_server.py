"""The health port against clients as they come: proper, slow, wrong and hostile ones."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer

from slurm_elastic.agent.health.pages import NodePages
from slurm_elastic.agent.health.server import HealthServer, HealthSettings, Limits, listen
from tests.local.waiting import HANG, descriptors, eventually, meanwhile

TOKEN = "0123456789abcdef"
PATIENT = Limits(connections=8, request_seconds=60, answer_seconds=60)
"""For clients that are proper, however long they have to wait for a processor."""
STRICT = Limits(connections=8, request_seconds=0.3, answer_seconds=0.5)


class Pages(NodePages):
    """Pages of a node, one of them slow and one broken."""

    def __init__(self) -> None:
        self.asked, self.release = threading.Event(), threading.Event()

    def ready(self) -> tuple[bool, str]:
        raise RuntimeError("broken")

    def status(self) -> bytes:
        return b"s" * (16 << 20)

    def metrics(self) -> tuple[bytes, str]:
        return b"metrics", "text/plain"

    def stacks(self) -> bytes:
        self.asked.set()
        assert self.release.wait(HANG)
        return b"stacks"


class Port:
    """A health port, and clients of it."""

    def __init__(self, limits: Limits) -> None:
        self.last_progress = time.time
        self.pages = Pages()
        listener = listen(HealthSettings())
        self.server = HealthServer(
            lambda: int(self.last_progress()), listener, 60, self.pages, protected=False, limits=limits
        )
        self.server.token = TOKEN
        self.server.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), HANG)

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=HANG)

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(self.client()) as client:
            client.request("GET", path, headers=headers)
            response = client.getresponse()
            return response.status, response.read()

    def said_to(self, content: bytes) -> bytes:
        """What it answers until it closes the connection."""
        with self.connect() as client:
            client.sendall(content)
            return everything(client)


@pytest.fixture
def make() -> Iterator[Callable[..., Port]]:
    made: list[Port] = []

    def open_port(limits: Limits = PATIENT) -> Port:
        made.append(Port(limits))
        return made[-1]

    yield open_port
    for port in made:
        port.pages.release.set()
        port.server.stop()


def everything(client: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.skipif(not hasattr(HealthCheckServer, "alive_callback"), reason="a property since torch 2.13")
def test_its_callback_is_that_of_torch(make: Callable[..., Port]) -> None:
    before = int(time.time())
    assert before <= make().server.alive_callback() <= time.time()


def test_it_is_alive_while_there_is_progress(make: Callable[..., Port]) -> None:
    port = make()
    assert port.get("/healthz") == (200, b"alive\n")
    port.last_progress = lambda: time.time() - 75
    status, text = port.get("/healthz")
    assert status == 503
    said = re.fullmatch(rb"no activity for (\d+) s\n", text)
    assert said is not None
    assert 75 <= int(said[1]) <= 75 + HANG


@pytest.mark.parametrize("path", ["/metrics", "/healthz"])
def test_whoever_asks_too_much_waits_and_no_probe_does(make: Callable[..., Port], path: str) -> None:
    port = make()
    begin = time.monotonic()
    asked = f"GET {path} HTTP/1.1\r\n\r\n".encode()
    assert port.said_to(asked * 149 + asked.replace(b"1.1", b"1.0")).count(b"200 OK") == 150
    assert time.monotonic() - begin >= 1.0
    # It would have to wait for a minute.
    port = make(dataclasses.replace(PATIENT, requests_per_second=2))
    with port.connect() as client:
        client.sendall(asked * 200)
        answers = b""
        while answers.count(b"200 OK") < 2:
            answers += (part := client.recv(1 << 20))
            assert part
        # More than one connection may ask for in a second.
        for _ in range(10):
            assert port.get("/healthz")[0] == 200
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            answers += client.recv(1 << 20)
        assert answers.count(b"200 OK") < 200


def waits(client: socket.socket) -> bool:
    """Whether the server has neither answered this connection nor closed it."""
    try:
        client.recv(1)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass  # The server closed it before it had read the request.
    return False


def test_whoever_says_no_more_is_still_answered(make: Callable[..., Port]) -> None:
    port = make()
    with port.connect() as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert everything(client).endswith(b"metrics")


def test_a_failure_of_ours_is_an_answer_too(make: Callable[..., Port], caplog: pytest.LogCaptureFixture) -> None:
    port = make()
    assert port.get("/readyz") == (500, b"failed; see the agent's log\n")
    assert port.get("/readyz")[0] == 500
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"garbage\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 1_000_000, b"431"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 1_000_000, b"431"),
        (b"POST /status HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + b"a" * 1_000_000, b"413"),
    ],
    ids=["garbage", "long line", "long header", "body"],
)
def test_nonsense_is_answered_and_ended(make: Callable[..., Port], content: bytes, status: bytes) -> None:
    port = make()
    assert port.said_to(content).startswith(b"HTTP/1.1 " + status)
    assert port.get("/healthz")[0] == 200


@pytest.mark.parametrize(
    "content", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nA: b\r\n", b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03\r\n"]
)
def test_half_a_request_is_not_waited_for_longer_than_the_limit(make: Callable[..., Port], content: bytes) -> None:
    port = make(STRICT)
    with port.connect() as client:
        # It may be over before it was said.
        with contextlib.suppress(ConnectionError):
            client.sendall(content)
        assert everything(client) == b""


def test_drops_of_a_request_do_not_prolong_it(make: Callable[..., Port]) -> None:
    port = make(STRICT)
    with port.connect() as client, contextlib.suppress(ConnectionError):
        for _ in range(400):
            client.sendall(b"G")
            time.sleep(0.05)
        pytest.fail("it waits for drops without end")


def test_who_does_not_take_its_answer_is_ended(make: Callable[..., Port]) -> None:
    port = make(dataclasses.replace(PATIENT, answer_seconds=0.5))
    with port.connect() as client:
        client.sendall(b"GET /status HTTP/1.1\r\n\r\n")
        # It cannot be seen from the client's side, for which what was sent still lies in the kernel.
        eventually(lambda: port.server._connections)
        eventually(lambda: not port.server._connections)
    with make().connect() as client:
        # One that takes it slowly gets all of it.
        client.sendall(b"GET /status HTTP/1.0\r\n\r\n")
        assert len(everything(client)) > 16 << 20


def test_connections_without_end_lock_nobody_out(make: Callable[..., Port]) -> None:
    # No connection ends because its time is over.
    port = make(dataclasses.replace(PATIENT, request_seconds=10 * HANG))
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(port.connect()) for _ in range(50)]
        for client in clients:
            client.setblocking(False)
            # The server may have closed it for a newer one.
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /hea")
        assert port.get("/healthz")[0] == 200
        eventually(lambda: sum(map(waits, clients)) <= 8)


def test_a_slow_answer_holds_nobody_up_and_is_made_once(make: Callable[..., Port]) -> None:
    port = make()
    token = {"Authorization": f"Bearer {TOKEN}"}
    with meanwhile(lambda: port.get("/stacks", **token)) as answers:
        assert port.pages.asked.wait(HANG)
        assert port.get("/healthz")[0] == 200
        assert port.get("/stacks", **token)[0] == 503
        port.pages.release.set()
    assert answers == [(200, b"stacks")]


def test_nothing_is_left_when_it_stops(make: Callable[..., Port]) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    port = make()
    with port.connect() as client:
        client.sendall(b"GET /hea")
        eventually(lambda: port.server._connections)
        port.server.stop()
        assert everything(client) == b""
    # What other tests have left may go meanwhile.
    eventually(lambda: not set(threading.enumerate()) - threads)
    assert not descriptors().items() - files.items()


def test_no_child_holds_the_port(make: Callable[..., Port]) -> None:
    before = descriptors()
    port = make()
    with port.connect():
        eventually(lambda: port.server._connections)
        own = {fd for fd, _ in descriptors().items() - before.items()}
        # The listener, both ends of the connection, and those by which the loop is woken.
        assert len(own) > 3
        assert not [fd for fd in own if _is_inheritable(fd)]


def _is_inheritable(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.get_inheritable(fd)
    return False
