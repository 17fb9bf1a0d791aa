"""The state of a node's GPUs, as nvidia-smi and the kernel log tell it: parsers, which are pure, and what runs them."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path

from slurm_elastic.agent.site_command import run_site_command

_CONTROL = Path("/dev/nvidiactl")
_KERNEL_LOG = Path("/dev/kmsg")
_TIMEOUT = 10.0
"""Seconds for nvidia-smi; if it takes longer, nothing is judged: it may load the driver first."""
_FIELDS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.failure",
    "retired_pages.pending",
)
_LOST = re.compile(r"GPU is lost|Unable to determine the device handle", re.IGNORECASE)
"""nvidia-smi's words for a GPU that does not answer any more (driver 535 and 570)."""
_YES = frozenset({"1", "yes"})

_XID = re.compile(r"^[^,;]*,[0-9]+,([0-9]+),[^;]*;.*NVRM: Xid \(([^)]*)\): ([0-9]+)\b", re.MULTILINE)
"""A line of /dev/kmsg: priority, number, microseconds since boot, flags; text (kernel.org, ABI/testing/dev-kmsg)."""
_HARDWARE = {
    48: "a double-bit ECC error",
    64: "a row that cannot be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained ECC error",
    119: "its system processor does not answer",
}
"""Xid numbers that only hardware or its driver causes, and never a script (docs.nvidia.com, Xid catalogue)."""
_XID_WINDOW = 3600.0


def gpu_problems() -> list[str]:
    """Return a line for each GPU of this node that is broken; none where there is no driver, or it does not tell."""
    if not _CONTROL.exists():
        return []
    problems = xid_shortcomings(_kernel_log(), time.clock_gettime(time.CLOCK_MONOTONIC))
    program = shutil.which("nvidia-smi")
    if program is None:
        return problems
    command = f"{program} --query-gpu={','.join(_FIELDS)} --format=csv,noheader,nounits"
    return [*gpu_shortcomings(run_site_command(command, _TIMEOUT).output), *problems]


def gpu_shortcomings(output: str) -> list[str]:
    """Return a line for each GPU that its own counters call broken. Pure.

    Args:
        output: What nvidia-smi has printed, for the fields of this module in CSV. A GPU without ECC says "[N/A]".
    """
    if _LOST.search(output):
        line = next(line for line in output.splitlines() if _LOST.search(line))
        return [f"nvidia-smi: {line.strip()}"]
    problems = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) or not cells[0].isdecimal():
            continue
        index, errors, unmappable, retiring = cells
        if errors.isdecimal() and int(errors):
            problems.append(f"GPU {index} has {errors} uncorrectable ECC errors since its last reset")
        if unmappable.lower() in _YES:
            problems.append(f"GPU {index} cannot remap a broken row of its memory")
        if retiring.lower() in _YES:
            problems.append(f"GPU {index} waits for a reset to retire a page of its memory")
    return problems


def xid_shortcomings(log: str, now: float) -> list[str]:
    """Return a line for each kind of hardware error of a GPU that the kernel has logged within the last hour. Pure.

    Args:
        log: Records of /dev/kmsg.
        now: Seconds since boot.
    """
    recent = Counter(
        (device, int(number))
        for microseconds, device, number in _XID.findall(log)
        if int(number) in _HARDWARE and 0 <= now - int(microseconds) / 1e6 < _XID_WINDOW
    )
    return [
        f"GPU {device} had Xid {number} ({_HARDWARE[number]}) {count} times in an hour"
        for (device, number), count in sorted(recent.items())
    ]


def _kernel_log() -> str:
    """Return the kernel log; empty where only root may read it (kernel.dmesg_restrict)."""
    records = []
    try:
        descriptor = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        while True:
            try:
                records.append(os.read(descriptor, 8192))
            except BrokenPipeError:
                # The kernel has overwritten records meanwhile: the next read goes on.
                continue
    except OSError:
        return b"".join(records).decode(errors="replace")
    finally:
        os.close(descriptor)
