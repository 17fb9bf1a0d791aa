"""torch's own dynamic rendezvous over c10d in the same harness: the store in one process, the agents in another."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler


def gather(size: int, limit: float) -> float | None:
    """Let `size` agents rendezvous with torch's defaults; seconds until all know their rank, None after `limit`.

    Each agent has its own connection to the store and its own handler, as under torchrun; the connections stand before
    the clock starts.
    """
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_agents, args=(other, size), daemon=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process.start()
    try:
        pipe.send(store.port)
        pipe.recv()
        pipe.send("go")
        return float(pipe.recv()) if pipe.poll(limit) else None
    finally:
        process.kill()
        process.join()


def _agents(pipe: Connection, size: int) -> None:
    logging.disable(logging.CRITICAL)
    port = pipe.recv()
    handlers = [_handler(port, size) for _ in range(size)]
    ranks: list[int] = []
    threads = [
        threading.Thread(target=lambda handler=handler: ranks.append(handler.next_rendezvous().rank))
        for handler in handlers
    ]
    pipe.send("ready")
    pipe.recv()
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.monotonic() - begin
    if sorted(ranks) != list(range(size)):
        raise RuntimeError(f"{len(set(ranks))} different ranks for {size} agents")
    pipe.send(taken)
    time.sleep(3600)


def _handler(port: int, size: int) -> RendezvousHandler:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{port}",
        run_id="benchmark",
        min_nodes=size,
        max_nodes=size,
        local_addr="127.0.0.1",
        is_host="false",
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)
