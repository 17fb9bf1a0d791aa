"""What a slow name server does to torch's TCPStore, and why membership does not go through one.

    python -m benchmarks.store_names [--json FILE]

TCPStore's server looks up the name of every peer in the only thread that serves all of them (torch 2.13,
TCPStoreLibUvBackend.cpp: onConnect, formatSockAddr, getnameinfo). On its own socket, which is IPv6 for both families,
a peer shows as ::ffff:10.0.0.1, which no line of /etc/hosts matches. Here 100 clients connect, one after the other,
while a name server takes 0.1 s for every answer. Root only: the name server needs a network and a file of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import sandbox
from benchmarks.options import make_parser
from benchmarks.tables import Results, Table, median, seconds

_CLIENTS = 100
_DELAY = 0.1


def main() -> int:
    """Measure and show."""
    options = make_parser("store_names").parse_args()
    if os.geteuid() != 0:
        print("needs root: run it with sudo", file=sys.stderr)
        return 2
    sandbox.enter("benchmarks.store_names", files=True)
    questions = _serve_slow_names()
    results = Results.of("store_names")
    table = Table(
        f"{_CLIENTS} clients connect to a TCPStore while the name server takes {_DELAY} s (s)",
        ["TCPStore listens on", "all clients", "median", "slowest", "names asked for", "another client waits"],
        note="Another client waits: the longest get() of a client that was connected before. A client asks for a name, "
        "too, which delays nobody else.",
    )
    for name, ipv4_only in (("its own socket, [::]", False), ("an IPv4 socket", True)):
        questions.clear()
        taken, stall = _connect(ipv4_only)
        times = (seconds(sum(taken)), seconds(median(taken), 4), seconds(max(taken), 4))
        table.rows.append([name, *times, len(questions), seconds(stall)])
    results.add(table)
    return results.finish(options.json)


def _connect(ipv4_only: bool) -> tuple[list[float], float]:
    from torch._C._distributed_c10d import TCPStore

    if ipv4_only:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    waits = [0.0]
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            begin = time.monotonic()
            store.get("key")
            waits.append(time.monotonic() - begin)
            time.sleep(0.001)

    asking = threading.Thread(target=ask)
    asking.start()
    clients, taken = [], []
    for _ in range(_CLIENTS):
        begin = time.monotonic()
        clients.append(TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
        taken.append(time.monotonic() - begin)
    over.set()
    asking.join()
    return taken, max(waits)


def _serve_slow_names() -> list[bytes]:
    """Make this process's name server one that knows no name, and takes its time to say so."""
    configuration = Path(tempfile.mkdtemp(prefix="benchmark-")) / "resolv.conf"
    configuration.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", str(configuration), "/etc/resolv.conf"], check=True)
    configuration.unlink()
    configuration.parent.rmdir()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    questions: list[bytes] = []

    def answer() -> None:
        while True:
            question, peer = server.recvfrom(4096)
            questions.append(question)
            time.sleep(_DELAY)
            # RFC 1035, 4.1.1: a response, recursion available, code 3: no such name.
            server.sendto(question[:2] + b"\x81\x83" + question[4:], peer)

    threading.Thread(target=answer, daemon=True).start()
    return questions


if __name__ == "__main__":
    sys.exit(main())
