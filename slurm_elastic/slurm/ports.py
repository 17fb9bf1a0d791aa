"""The ports of a leader's endpoint.

Every agent derives the same short list, so that all of them try the same next port if one is in use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from slurm_elastic.errors import UsageError

CANDIDATES = 16
"""Number of derived ports in the list."""

_FLOOR = 10000
"""Most registered services have lower ports, among them Slurm's own 6817 to 6819."""
_LEAST_CHOICE = 4096
"""Minimum number of ports below the ephemeral range, so that jobs rarely choose the same port."""
_DEFAULT_EPHEMERAL_LOW = 32768
"""Linux's default, ip(7)."""


def ephemeral_low(source: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """Return the lowest port that the kernel gives to outgoing connections, ip(7).

    Returns:
        The kernel's default where the file cannot be read.
    """
    try:
        return int(source.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_EPHEMERAL_LOW


def port_sequence(run_id: str, restart_count: int, ephemeral_low: int, reserved: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the ports to try, in order: those that Slurm reserved, then `CANDIDATES` derived ones.

    The derived ports are below the ephemeral range, so that no outgoing connection uses them. A hash scatters them, so
    that jobs with consecutive ids on one node rarely choose the same. If the ephemeral range of a site begins too low,
    they are in 10000 to 32767 all the same; agents skip ports in use.

    Args:
        run_id: Id of the run.
        restart_count: Restart count of the job, so that a requeued job does not find the leader of its earlier start.
        ephemeral_low: Lowest port of the ephemeral range, see `ephemeral_low`.
        reserved: SLURM_STEP_RESV_PORTS, the same for all agents of the step.
    """
    low, high = _span(ephemeral_low)
    derived: dict[int, None] = {}
    turn = 0
    while len(derived) < CANDIDATES:
        text = f"{run_id}\0{restart_count}\0{turn}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        derived[low + int.from_bytes(digest, "big") % (high - low)] = None
        turn += 1
    return tuple(dict.fromkeys((*reserved, *derived)))


def ports_exhausted(node: str, ports: Sequence[int]) -> UsageError:
    """Return the error for a node on which every port of the list is in use."""
    listed = ", ".join(map(str, ports))
    return UsageError(
        f"every rendezvous port of this run is in use on {node} ({listed}); "
        "give another one by --rdzv-endpoint HOST:PORT, or reserve ports by srun --resv-ports"
    )


def _span(ephemeral_low: int) -> tuple[int, int]:
    low = min(_FLOOR, ephemeral_low - _LEAST_CHOICE)
    if low < 1024:
        return _FLOOR, _DEFAULT_EPHEMERAL_LOW
    return low, ephemeral_low
