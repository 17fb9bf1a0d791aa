"""Which port the rendezvous endpoint of a run listens on.

Every agent derives the same short list, so a port in use leads all of them to the same next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from slurm_elastic.errors import UsageError

__all__ = ["CANDIDATES", "ephemeral_low", "port_sequence", "ports_exhausted"]

CANDIDATES = 16
"""Length of the list."""

_FLOOR = 10000
"""Below are most registered services, Slurm's own 6817 to 6819 among them."""
_LEAST_CHOICE = 4096
"""Fewer ports than this below the ephemeral range make jobs meet too often."""
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

    The derived ones lie below the ephemeral range, where no outgoing connection takes them. The hash
    scatters them, so that jobs with consecutive ids on one node rarely meet. Where a site has the ephemeral
    range begin so low that nothing fits below, they are taken from 10000 to 32767 all the same: one in use
    leads to the next.

    Args:
        run_id: of the run.
        restart_count: of the job; a requeued job does not meet the store of its previous incarnation.
        ephemeral_low: see `ephemeral_low`.
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
        "give another by --rdzv-endpoint HOST:PORT, or reserve some by srun --resv-ports"
    )


def _span(ephemeral_low: int) -> tuple[int, int]:
    low = min(_FLOOR, ephemeral_low - _LEAST_CHOICE)
    if low < 1024:
        return _FLOOR, _DEFAULT_EPHEMERAL_LOW
    return low, ephemeral_low
