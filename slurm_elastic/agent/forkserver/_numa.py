"""The effect of torch's NUMA wrapper on a worker's command (torch/numa/binding.py, 2.13), for one that is forked."""

from __future__ import annotations

import re

__all__ = ["bound_cpus"]


def bound_cpus(bound: tuple[str, ...], command: tuple[str, ...]) -> tuple[int, ...] | None:
    """The CPUs that the wrapper would bind a command to; None if it left the command alone.

    Raises:
        RuntimeError: it did something else to it.
    """
    if bound == command:
        return None
    option = re.fullmatch(r"--physcpubind=([0-9,-]+)", bound[1])
    if option is None:
        raise RuntimeError(f"torch's NUMA binding is not understood: {' '.join(bound[:2])}")
    cpus: list[int] = []
    for part in option[1].split(","):
        first, _dash, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)
