"""Another ordinary user on a node of the cluster, who does to a run what it can, again and again.

    neighbour.py RUN_DIRECTORY NODE OVER REPORT ETCD GREETING PORT...

ETCD is where the run's records are, as http://HOST:PORT/PREFIX; empty if they are in no etcd. GREETING is one of an
agent of another run, in hex: the program needs Python alone, as others may not read a checkout.
It takes the ports before it says so in REPORT, and goes on until the file OVER is there. REPORT has how often it did
what, what of that changed anything, and if it is over.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Endpoint = tuple[str, int]

IDLE = 300
"""Connections to the leader and to the store of the workers that this node keeps open; four nodes make 1,200."""
SHOUTS = 20
"""Connections of each pass on which it says something."""
KEYS = 20
"""Keys that each pass writes into etcd."""
PAUSE = 0.3
SHOWN = b"\x1b]0;owned\x07\x1b[2J\r\nroot: all is well\n"
SHARED_MEMORY = Path("/dev/shm")


class Neighbour:
    def __init__(self, run_dir: Path, node: str, etcd: str, forged: bytes) -> None:
        self.run_dir, self.node, self.etcd, self.forged = run_dir, node, etcd, forged
        self.did: Counter[str] = Counter()
        self.changed: list[str] = []
        self.greetings: list[bytes] = []
        self.idle: dict[str, list[socket.socket]] = {"leader": [], "store": []}

    def squat(self, ports: list[int]) -> None:
        """Listen where the leader is expected, answer with nonsense, and keep what agents of the run say."""
        waiting = selectors.DefaultSelector()
        for port in ports:
            # The run may have it.
            with contextlib.suppress(OSError):
                listener = socket.create_server(("", port))
                listener.setblocking(False)
                waiting.register(listener, selectors.EVENT_READ)

        def serve() -> None:
            while True:
                for key, _ in waiting.select():
                    with contextlib.suppress(OSError):
                        connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                        with connection:
                            connection.settimeout(0.5)
                            self.greetings = [*self.greetings[-20:], connection.recv(4096)]
                            connection.sendall(secrets.token_bytes(100))
                            self.did["squat"] += 1

        threading.Thread(target=serve, daemon=True).start()

    def go_on(self) -> None:
        for attack in (self.hold, self.shout, self.forge, self.write_keys, self.ask_health, self.take_names):
            with contextlib.suppress(OSError, ValueError, KeyError):
                attack()

    # Where things are, as everybody may read it.

    def places(self) -> dict[str, list[Endpoint]]:
        found: dict[str, list[Endpoint]] = {"leader": [], "store": [], "follower": []}
        for path in self.run_dir.glob("endpoints/*.json"):
            record = json.loads(path.read_text())
            found["leader"].append((record["address"], record["port"]))
        for path in sorted(self.run_dir.glob("rounds/*.json"))[-1:]:
            record = json.loads(path.read_text())
            found["store"].append((record["places"][0]["address"], record["store_port"]))
            found["follower"] += [(place["address"], place["standby_port"]) for place in record["places"]]
        return found

    # Connections.

    def hold(self) -> None:
        """Keep many connections that say nothing."""
        places = self.places()
        for what, held in self.idle.items():
            alive = [one for one in held if is_open(one)]
            for endpoint in places[what]:
                while len(alive) < IDLE:
                    alive.append(self.connect(endpoint))
                    self.did[f"idle {what}"] += 1
            self.idle[what] = alive

    def shout(self) -> None:
        """Say what does not belong there."""
        for what, endpoints in self.places().items():
            for endpoint in endpoints:
                for number in range(SHOUTS):
                    self.say(what, endpoint, number)

    def say(self, what: str, endpoint: Endpoint, number: int) -> None:
        kinds = {
            "garbage": secrets.token_bytes(200),
            "http": b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
            "control": SHOWN,
            "forged": self.forged,
            "large": b"\xff" * 5000,
            "no text": frame(b'{"hello":"\xff"}'),
            "deep": frame(b"[" * 10_000),
            "digits": frame(b'{"epoch":' + b"9" * 10_000 + b"}"),
            "replay": self.greetings[number % len(self.greetings)] if self.greetings else self.forged,
        }
        kind = [*kinds][number % len(kinds)]
        with contextlib.suppress(OSError), self.connect(endpoint) as connection:
            connection.sendall(kinds[kind])
            self.did[f"{kind} {what}"] += 1

    def connect(self, endpoint: Endpoint) -> socket.socket:
        # On its own node it has more addresses than the log may have lines.
        source = (f"127.{os.getpid() % 200}.{secrets.randbelow(255)}.{1 + secrets.randbelow(250)}", 0)
        try:
            with contextlib.suppress(OSError):
                if socket.gethostbyname(endpoint[0]) == socket.gethostbyname(self.node):
                    return socket.create_connection(("127.0.0.1", endpoint[1]), 0.5, source)
            return socket.create_connection(endpoint, 0.5)
        except OSError:
            self.did["refused or late"] += 1
            raise

    # Files.

    @property
    def scope(self) -> str:
        (scope,) = [path.stem for path in self.run_dir.glob("endpoints/[!.]*.json")] or [f"{self.run_dir.name}.0"]
        return scope

    def forge(self) -> None:
        """Put records, links and logs in place of the run's."""
        scope = self.scope
        done = json.dumps({"outcome": "succeeded", "epoch": 9}).encode()
        endpoint = json.dumps({"refusal": SHOWN.decode()}).encode()
        for name, content in (
            ("done.json", done),
            (f"endpoints/{scope}.json", endpoint),
            ("rounds/000001.json", done),
            (f"epochs/{scope}/000002.json", b"{}"),
            (f"failures/{scope}.json", done),
            (f"events/{self.node}.jsonl", b"forged\n"),
            ("health-token", b"0" * 64 + b"\n"),
            ("secret", b"0" * 64 + b"\n"),
        ):
            path = self.run_dir / name
            self.tries(f"write {name}", lambda path=path, content=content: write(path, content))
            self.tries(f"replace {name}", lambda path=path, content=content: replace(path, content))
        for name in ("logs/round_0001", "done.json", f"health/{self.node}.json"):
            self.tries(f"link {name}", lambda name=name: (self.run_dir / name).symlink_to("/etc/passwd"))
        self.tries("move", lambda: self.run_dir.rename(self.run_dir.with_name("moved")))
        for secret in ("secret", "health-token"):
            self.tries(f"read {secret}", lambda secret=secret: (self.run_dir / secret).read_bytes())

    def write_keys(self) -> None:
        """Write into an etcd that is open to all, below the run's prefix: the run's records unsigned, and much else."""
        if not self.etcd:
            return
        url = urllib.parse.urlsplit(self.etcd)
        forged = json.dumps({"outcome": "succeeded", "epoch": 9, "refusal": SHOWN.decode()}).encode()
        names = [
            b"done",
            *(f"scopes/{self.scope}/{name}".encode() for name in ("endpoint", "failure", "epochs/000007")),
        ]
        names += [f"scopes/{self.scope}/epochs/".encode() + secrets.token_bytes(12) + SHOWN for _ in range(KEYS)]
        with contextlib.closing(http.client.HTTPConnection(url.netloc, timeout=3.0)) as client:
            for name in names:
                pair = {"key": url.path.encode() + name, "value": forged}
                body = json.dumps({word: base64.b64encode(content).decode() for word, content in pair.items()})
                client.request("POST", "/v3/kv/put", body)
                answer = client.getresponse()
                answer.read()
                self.did[f"etcd {answer.status}"] += 1

    def take_names(self) -> None:
        """Take names in shared memory, and open those of others."""
        for number, purpose in enumerate(("control", "watchdog", "agent")):
            name = f"slurm-elastic-{purpose}-{number}"
            with contextlib.suppress(FileExistsError):
                (SHARED_MEMORY / name).symlink_to(self.run_dir.parent.parent)
                self.did["names"] += 1
        for path in SHARED_MEMORY.glob("slurm-elastic-*"):
            if not path.is_symlink() and path.stat().st_uid != os.getuid():
                self.tries("list shared memory", lambda path=path: [*path.iterdir()])
                self.tries("write shared memory", lambda path=path: write(path / "0", b"\1" * 4096))

    def tries(self, what: str, call: Callable[[], object]) -> None:
        self.did[what.split()[0]] += 1
        try:
            call()
        except OSError:
            return
        self.changed.append(what)

    # The health port of this node.

    def ask_health(self) -> None:
        for path in self.run_dir.glob(f"health/{self.node}.*.json"):
            (group,) = json.loads(path.read_text())
            host, _, port = group["targets"][0].rpartition(":")
            with socket.create_connection((host, int(port)), 1.0) as flood:
                flood.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
                for page, headers in (
                    ("/stacks", {}),
                    ("/stacks", {"Authorization": "Bearer " + "0" * 64}),
                    ("/healthz", {}),
                ):
                    self.did[f"{page} {status(host, int(port), page, **headers)}"] += 1
            self.did[f"rebinding {status(host, int(port), '/status', Host='evil.example')}"] += 1


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def status(host: str, port: int, page: str, **headers: str) -> object:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=3.0)) as client:
        try:
            client.request("GET", page, headers=headers)
            return client.getresponse().status
        except OSError as error:
            return type(error).__name__


def is_open(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        with contextlib.suppress(ConnectionError):
            if connection.recv(4096, socket.MSG_DONTWAIT):
                return True
        connection.close()
        return False
    return True


def write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, content)
    os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    mine = path.with_name(f".{path.name}.neighbour")
    write(mine, content)
    mine.replace(path)


def report(path: Path, neighbour: Neighbour, *, over: bool) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"did": neighbour.did, "changed": neighbour.changed, "over": over}))
    part.replace(path)


def main() -> None:
    run_dir, node, over, reported, etcd, greeting, *ports = sys.argv[1:]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    neighbour = Neighbour(Path(run_dir), node, etcd, bytes.fromhex(greeting))
    neighbour.squat([int(port) for port in ports])
    while not Path(over).exists():
        report(Path(reported), neighbour, over=False)
        neighbour.go_on()
        time.sleep(PAUSE)
    for path in SHARED_MEMORY.glob("slurm-elastic-*"):
        if path.lstat().st_uid == os.getuid():
            path.unlink()
    report(Path(reported), neighbour, over=True)


if __name__ == "__main__":
    main()
