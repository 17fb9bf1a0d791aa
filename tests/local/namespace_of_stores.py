"""Serves stores of workers in a network namespace of its own, and says as JSON who reached them.

    namespace_of_stores.py store UID     a store that is served as this user
    namespace_of_stores.py run DIRECTORY a run of two agents, whose store that of its first round is

The nodes of the round have two addresses; a stranger connects from a third one.
"""

from __future__ import annotations

# Names are looked up with it, and an ordinary user may not be able to read an interpreter below root's home.
import encodings.idna  # noqa: F401
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from slurm_elastic.rendezvous.membership import Place, Reason
from slurm_elastic.rendezvous.store_process import prepare_stores
from slurm_elastic.rendezvous.transport.messages import Assignment
from slurm_elastic.rendezvous.worker_store import FreshPorts, open_worker_store
from tests.local.agents import allocation

NETWORK = "10.1.0"
SERVER, MEMBER, STRANGER = (f"{NETWORK}.{number}" for number in (1, 2, 3))


def serve_a_store(user: int) -> dict[str, Any]:
    add_addresses(SERVER, MEMBER, STRANGER)
    if user != os.getuid():
        os.setgroups([])
        os.setuid(user)
    # As agents do: a thread may look up a name while a store is forked.
    prepare_stores()
    reserved = FreshPorts(SERVER).reserve()
    own = reserved.addresses
    early = connect(STRANGER, reserved.port)
    client: list[TCPStore] = []
    # That of a worker whose agent is told of the round before rank 0's is: it may wait behind the stranger's.
    worker = threading.Thread(target=lambda: client.append(TCPStore(SERVER, reserved.port, is_master=False)))
    worker.start()
    place = Place("n1/1.0/1", "n1", 0, 1, 0, "default", 0, 2)
    members = (SERVER, MEMBER)
    placed = Assignment(1, place, 0, Reason.START, 2, 2, SERVER, reserved.port, 0, store_clients=members)
    served = open_worker_store(placed, reserved)
    assert served is not None
    worker.join()
    client[0].set("key", "value")
    found = {
        "addresses": own,
        "value": client[0].get("key").decode(),
        "early": is_open(early),
        "member": connect(MEMBER, reserved.port) is not None,
        "stranger": connect(STRANGER, reserved.port) is not None,
        "other address": socket.socket().connect_ex((MEMBER, reserved.port)) != errno.ECONNREFUSED,
    }
    served.close()
    return found


def run_two_agents(directory: Path) -> dict[str, Any]:
    add_addresses(SERVER, MEMBER)
    with allocation(directory, 2, network=NETWORK) as nodes:
        agents = nodes.start_all()
        nodes.seen(0)
        # Both agents have said which addresses this namespace has, and this one is not among them.
        add_addresses(STRANGER)
        port = json.loads((nodes.run_dir / "rounds/000000.json").read_text())["store_port"]
        found = {
            "member": connect(MEMBER, port) is not None,
            "stranger": connect(STRANGER, port) is not None,
        }
        nodes.touch("finish")
        return {"codes": [agent.wait() for agent in agents], **found, "log": nodes.log()}


def add_addresses(*addresses: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in addresses:
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)


def connect(source: str, port: int) -> socket.socket | None:
    try:
        # Within one machine the kernel connects at once, or never.
        return socket.create_connection((SERVER, port), 0.5, (source, 0))
    except TimeoutError:
        return None


def is_open(connection: socket.socket | None) -> bool:
    assert connection is not None
    connection.settimeout(0.5)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except ConnectionError:
        return False


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, what, argument = sys.argv
    print(json.dumps(serve_a_store(int(argument)) if what == "store" else run_two_agents(Path(argument))))
