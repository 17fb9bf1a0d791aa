"""Connections between the nodes of the doctor's job: reachable ports, round trips, delays of files.

Every node serves two ports and asks the others. Both sides prove that they know the secret of the doctor's run before
anything else is read, so other users of the cluster can make a check fail, but not give it another result; messages are
a few bytes, and none is unpickled. Not by the agents' session (rendezvous/transport): nodes whose releases speak other
protocols shall be named by their releases, and not by connections that end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from slurm_elastic.doctor.facts import LinkFacts, ProbeResult
from slurm_elastic.rundir import RunDir, RunDirError, is_signature, signature
from slurm_elastic.slurm import ephemeral_low, port_sequence

_CONTEXT = b"slurm_elastic doctor 1\0"
_NONCE = 32
_ECHO, _FILE = b"echo", b"file"
_ROUNDS = 20
_CONNECT = 4.0
"""Seconds in which a node answers that no firewall hides. Linux asks at once and after 1 and 3 s (kernel documentation,
ip-sysctl, tcp_syn_retries: an initial RTO of 1 s, then doubled), so the network may lose two packets."""
_ANSWER = 10.0
_FILE_SEEN = 8.0
"""Seconds to wait for a file: an NFS client asks for a name that it has looked for before after 3 to 60 s (acdirmin and
acdirmax, nfs(5)), and the product asks anew by itself."""


def serve_peers(run_dir: RunDir, node: str) -> tuple[int, int]:
    """Answer other nodes, in threads, until this process ends; return a port such as a leader's, and a free one.

    The first is 0 if all such ports are taken.
    """
    free, leader = socket.create_server(("", 0), backlog=1024), None
    for port in port_sequence(run_dir.run_id, 0, ephemeral_low()):
        with contextlib.suppress(OSError):
            leader = socket.create_server(("", port), backlog=1024)
            break
    for listening in filter(None, (free, leader)):
        threading.Thread(target=_accept, args=(listening, run_dir, node), daemon=True).start()
    return leader.getsockname()[1] if leader else 0, free.getsockname()[1]


def _accept(listening: socket.socket, run_dir: RunDir, node: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            accepted, _ = listening.accept()
            threading.Thread(target=_serve, args=(accepted, run_dir, node), daemon=True).start()


def _serve(accepted: socket.socket, run_dir: RunDir, node: str) -> None:
    with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError), _connection(accepted) as peer:
        _prove(peer, run_dir.secret(), "serves", "asks")
        while True:
            message = peer.recv_bytes(256)
            if message.startswith(_FILE):
                with contextlib.suppress(RunDirError):
                    run_dir.publish_record({}, _file_name(node, message[len(_FILE) :].decode()))
            peer.send_bytes(message)


def ask_peer(run_dir: RunDir, here: str, peer: ProbeResult) -> LinkFacts:
    """Find out about the way from this node to another one, given what the other one has written so far."""
    there, address = peer.facts.node, peer.facts.address
    leader, leader_error = _connect(address, peer.leader_port)
    if leader is not None:
        leader.close()
    connected, error_of_free = _connect(address, peer.free_port)
    if connected is None:
        return LinkFacts(there, leader_error, error_of_free)
    try:
        with _connection(connected) as connection:
            _prove(connection, run_dir.secret(), "asks", "serves")
            times = [_timed(connection, _ECHO) for _ in range(_ROUNDS)]
            delay = _file_delay(run_dir, here, there, connection)
    except (OSError, EOFError, AuthenticationError, ValueError) as error:
        return LinkFacts(there, leader_error, f"its answer is not that of the doctor ({why(error)})")
    return LinkFacts(there, leader_error, "", statistics.median(times), delay)


def _connect(address: str, port: int) -> tuple[socket.socket | None, str]:
    """Return a connection, or None and why there is none; no reason where there is no port."""
    try:
        return (socket.create_connection((address, port), _CONNECT) if port else None), ""
    except OSError as error:
        return None, why(error)


def _connection(accepted: socket.socket) -> Connection:
    accepted.settimeout(None)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(accepted.detach())


def _prove(connection: Connection, secret: bytes, own: str, other: str) -> None:
    """Prove that this node knows the secret, and have the other one prove it; both call this with swapped roles.

    Raises:
        AuthenticationError: The other node does not know the secret.
    """
    nonce = os.urandom(_NONCE)
    connection.send_bytes(nonce)
    theirs = _receive(connection)
    connection.send_bytes(signature(secret, _CONTEXT, own, theirs + nonce))
    if not is_signature(_receive(connection), secret, _CONTEXT, other, nonce + theirs):
        raise AuthenticationError("it does not know the secret of the run")


def _receive(connection: Connection) -> bytes:
    # Not for ever: the other side may be stopped.
    if not connection.poll(_ANSWER):
        raise OSError(f"no answer within {_ANSWER:g} s")
    return connection.recv_bytes(256)


def _timed(connection: Connection, message: bytes) -> float:
    begin = time.monotonic()
    connection.send_bytes(message)
    _receive(connection)
    return time.monotonic() - begin


def _file_delay(run_dir: RunDir, here: str, there: str, connection: Connection) -> float | None:
    """Return the seconds after which a file that the other node makes now is seen here; None if it is not."""
    name = _file_name(there, here)
    # An NFS client remembers that there is no such file, as it does of the next round's record.
    run_dir.read_record(name)
    _timed(connection, _FILE + here.encode())
    begin = time.monotonic()
    while run_dir.read_record(name) is None:
        if time.monotonic() - begin > _FILE_SEEN:
            return None
        time.sleep(0.02)
    return time.monotonic() - begin


def _file_name(maker: str, asker: str) -> str:
    return f"file.{maker}.{asker}"


def why(error: BaseException) -> str:
    """Return the first line of an error, in the words of the kernel where it is one of those."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_CONNECT:g} s"
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0]
