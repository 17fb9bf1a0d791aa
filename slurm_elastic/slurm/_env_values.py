"""Parsers for values of single SLURM_* variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_elastic.errors import UsageError


def present(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the value of the first variable that is set and not empty; None if there is none.

    Slurm writes ``(null)`` to some variables that have no value.
    """
    for name in names:
        value = environ.get(name, "").strip()
        if value not in ("", "(null)"):
            return value
    return None


def number(name: str, text: str) -> int:
    """Return a variable's value as a number.

    Raises:
        UsageError: The value has other characters than digits.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(f"{name}={text!r} is not a number; Slurm sets it, do not set it by hand")
    return int(text)


def optional_number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first variable that is set, as a number; None if none is set."""
    text = present(environ, *names)
    return None if text is None else number(names[0], text)


def expand_counts(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Return the distinct counts of a variable such as SLURM_TASKS_PER_NODE, ``2(x3),1``."""
    text = present(environ, name)
    if text is None:
        return ()
    items = [re.fullmatch(r"([0-9]{1,9})(\(x[0-9]{1,9}\))?", item) for item in text.split(",")]
    if None in items:
        raise UsageError(f"{name}={text!r} is not of the form 2(x3),1; Slurm sets it, do not set it by hand")
    return tuple(int(item[1]) for item in items if item)


def port_list(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Return the ports of a variable such as SLURM_STEP_RESV_PORTS, ``21000-21001,21005``."""
    text = present(environ, name)
    if text is None:
        return ()
    ports: list[int] = []
    for item in text.strip("[]").split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 < first <= last < 65536:
            raise UsageError(f"{name}={text!r} is not a list of ports; Slurm sets it, do not set it by hand")
        ports.extend(range(first, last + 1))
    return tuple(ports)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that the job or step has on this node."""
    text = present(environ, "SLURM_GPUS_ON_NODE")
    if text is not None:
        return _count_on_node(text)
    for name in ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"):
        if name in environ:
            return _count_devices(environ[name])
    return 0


def _count_on_node(text: str) -> int:
    """Read ``4``, ``gpu:a100:2,gpu:v100:1`` (counts per type) or ``0,1,2`` (indices)."""
    if text.isascii() and text.isdigit():
        return number("SLURM_GPUS_ON_NODE", text)
    if ":" not in text:
        return _count_devices(text)
    counts = [re.search(r":([0-9]{1,6})$", re.sub(r"\(.*?\)", "", item)) for item in text.split(",")]
    if None in counts:
        raise UsageError(f"SLURM_GPUS_ON_NODE={text!r} is not a number of GPUs; give --nproc-per-node")
    return sum(int(count[1]) for count in counts if count)


def _count_devices(text: str) -> int:
    """Read ``0,2-3`` or UUIDs.

    CUDA stops at the first invalid index, such as -1 (CUDA C Programming Guide, CUDA_VISIBLE_DEVICES).
    """
    total = 0
    for item in filter(None, (item.strip() for item in text.split(","))):
        span = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", item)
        if span:
            total += int(span[2]) - int(span[1]) + 1
        elif item.startswith("-") or item == "NoDevFiles":
            break
        else:
            total += 1
    return total
