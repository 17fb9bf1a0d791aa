"""The requirements of a private etcd on its machine: a binary and free ports."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
from pathlib import Path

from slurm_elastic.errors import UsageError
from slurm_elastic.rendezvous.records.etcd.errors import EtcdServerError

__all__ = ["BINARY_VARIABLE", "find_binary", "free_port"]

BINARY_VARIABLE = "SLURM_ELASTIC_ETCD_BINARY"
_TORCH_BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PORT_ATTEMPTS = 100


def find_binary(binary: str | Path | None = None) -> Path:
    """Find an etcd.

    It is the one given, else that of SLURM_ELASTIC_ETCD_BINARY, else that of torch's
    TORCHELASTIC_ETCD_BINARY_PATH, else the one in PATH.

    Raises:
        UsageError: There is none.
    """
    given = str(binary or os.environ.get(BINARY_VARIABLE) or os.environ.get(_TORCH_BINARY_VARIABLE) or "etcd")
    found = shutil.which(given)
    if found is None:
        where = "" if "/" in given else " in PATH"
        raise UsageError(
            f"there is no etcd binary {given!r}{where}; install etcd (Debian: etcd-server) "
            f"or name its binary by {BINARY_VARIABLE}"
        )
    return Path(found)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on now, outside of those that the kernel gives to outgoing connections.

    Such a port is not taken by chance while a member that was killed is away.

    Raises:
        UsageError: The host is not an address of this machine.
        EtcdServerError: No port was found.
    """
    low = int(_PORT_RANGE.read_text().split()[0])
    candidates = range(max(1024, low - 16_000), low) if low > 2048 else range(10_000, 32_000)
    for port in random.sample(candidates, _PORT_ATTEMPTS):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                return port
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(f"cannot listen at {host!r} for etcd: {error}") from None
    raise EtcdServerError(f"found no free port at {host!r} for etcd")
