"""The membership's exchange over TCPStore's queues: what torch's own store would cost, if speed were all."""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import msgspec
from torch._C._distributed_c10d import TCPStore


def gather(size: int) -> tuple[float, float]:
    """Give `size` agents their rank; seconds since they began to connect, and since they began to join."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_lead, args=(other, size), daemon=True)
    process.start()
    try:
        port = pipe.recv()
        begin = time.monotonic()
        clients = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(size)]
        connected = time.monotonic()
        for index, client in enumerate(clients):
            client.queue_push("join", msgspec.json.encode({"node": f"n{index}", "position": index, "workers": 8}))
        ranks = {msgspec.json.decode(client.queue_pop(f"n{index}"))["rank"] for index, client in enumerate(clients)}
        end = time.monotonic()
        if len(ranks) != size:
            raise RuntimeError(f"{len(ranks)} different ranks for {size} agents")
        return end - begin, end - connected
    finally:
        process.kill()
        process.join()


def _lead(pipe: Connection, size: int) -> None:
    # IPv4 only, see benchmarks/store_names.py.
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    listener.setblocking(False)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    pipe.send(port)
    joins = [msgspec.json.decode(store.queue_pop("join")) for _ in range(size)]
    for rank, join in enumerate(sorted(joins, key=lambda join: join["position"])):
        store.queue_push(join["node"], msgspec.json.encode({"rank": rank, "world_size": 8 * size, "round": 0}))
    time.sleep(3600)
