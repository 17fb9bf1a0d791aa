"""The check of a node before its agent joins a run: a quick one of our own, and the command of the site.

It runs in a thread from the first moment on, while the agent imports what it needs.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from slurm_elastic.agent.node.site_command import run_site_command
from slurm_elastic.agent.signals import Notices
from slurm_elastic.text import size_text

logger = logging.getLogger("slurm_elastic")

_LEAST_MEMORY = 128 << 20
"""Bytes of memory below which a node starts no worker: torch alone takes more."""
_TIMEOUT = 60.0
_LOOK = 0.1
"""Seconds between two looks for a signal while the check runs."""
_OFF = "off"


class NodeCheck:
    """Checks this node in a thread.

    Args:
        command: ``--node-check``: a command for the shell; ``off`` for no check at all; empty for the quick one alone.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._problem = ""
        # A daemon: a command that hangs in the kernel does not hold up the end of the agent.
        self._thread = threading.Thread(target=self._run, name="slurm-elastic-node-check", daemon=True)
        self._thread.start()

    def problem(self, notices: Notices) -> str:
        """Wait for the result, and return what is wrong with this node in one line; empty for nothing."""
        while notices.first() is None and self._thread.is_alive():
            self._thread.join(_LOOK)
        return self._problem

    def _run(self) -> None:
        try:
            self._problem = self._find()
        except Exception as error:
            # A node that cannot even run its check is none to train on.
            self._problem = f"the check cannot be run: {error}"

    def _find(self) -> str:
        if self._command == _OFF:
            return ""
        short = memory_problems(Path("/proc/meminfo").read_text())
        full = unwritable((Path("/dev/shm"), Path(tempfile.gettempdir())))
        problem = "; ".join([*short, *full, *gpu_problems()])
        if problem or not self._command:
            return problem
        message = run_site_command(self._command, self._timeout).problem
        return f"--node-check {message}" if message else ""


def tell_site(command: str, node: str, run_id: str, reason: str) -> None:
    """Run ``--on-bad-node``, and log how it failed if it did."""
    if not command:
        return
    variables = {"SLURM_ELASTIC_NODE": node, "SLURM_ELASTIC_RUN_ID": run_id, "SLURM_ELASTIC_BAD_NODE_REASON": reason}
    problem = run_site_command(command, _TIMEOUT, {**os.environ, **variables}).problem
    if problem:
        logger.warning("--on-bad-node %s", problem)


def memory_problems(meminfo: str) -> list[str]:
    """Return a line if processes can get too little memory, by the text of /proc/meminfo (proc_meminfo(5)). Pure."""
    available = re.search(r"^MemAvailable: *([0-9]+) kB", meminfo, re.MULTILINE)
    if available is None or int(available[1]) * 1024 >= _LEAST_MEMORY:
        return []
    return [f"{size_text(int(available[1]) * 1024)} of memory are left"]


def unwritable(directories: Iterable[Path]) -> list[str]:
    """Return a line for each directory in which no file can be written; none for one that is not there."""
    problems = []
    for directory in dict.fromkeys(directories):
        if not directory.is_dir():
            continue
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                # A full tmpfs makes files, and refuses their first page.
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            fix = "mount it writable" if error.errno == errno.EROFS else "make room there"
            fix = "let this user write there" if error.errno in (errno.EACCES, errno.EPERM) else fix
            problems.append(f"no file can be written to {directory}: {error.strerror}; {fix}, or give --node-check=off")
    return problems


_CONTROL = Path("/dev/nvidiactl")
_READ_ALL = 3
"""The command of klogctl that takes nothing out of the log (syslog(2))."""
_GPU_TIMEOUT = 10.0
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

_XID = re.compile(r"^<[0-9]+>\[ *([0-9.]+)\](?:\[[^]]*\])? NVRM: Xid \(([^)]*)\): ([0-9]+)\b", re.MULTILINE)
"""A line of the kernel log: priority; seconds since boot, and the thread if it is told (printk.time, printk.caller)."""
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
    return [*gpu_shortcomings(run_site_command(command, _GPU_TIMEOUT).output), *problems]


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
        now: Seconds since boot.
    """
    recent = Counter(
        (device, int(number))
        for seconds, device, number in _XID.findall(log)
        if int(number) in _HARDWARE and 0 <= now - float(seconds) < _XID_WINDOW
    )
    return [
        f"GPU {device} had Xid {number} ({_HARDWARE[number]}) {count} times in an hour"
        for (device, number), count in sorted(recent.items())
    ]


def _kernel_log() -> str:
    """Return the end of the kernel log; empty where only root may read it (kernel.dmesg_restrict)."""
    log = ctypes.create_string_buffer(1 << 20)
    length = ctypes.CDLL(None).klogctl(_READ_ALL, log, len(log))
    return log.raw[: max(0, length)].decode(errors="replace")
