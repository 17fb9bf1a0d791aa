"""Find and end processes by the network namespace they live in.

A machine's processes never leave its namespace, whatever they do (daemons, sessions, orphans), and no
process of another cluster or of the host is in it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import network
from .errors import TestbedError


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a machine, with the ids that the host gives it."""

    pid: int
    parent: int
    user: str
    name: str
    command: str
    inner_pid: int
    """Its id inside the machine's own process namespace; 1 is the machine's init."""


_inits: dict[str, int] = {}
"""The id of each machine's first process, as it was found last."""


def of_namespace(namespace: str) -> list[Process]:
    """All processes in the network namespace; zombies, which hold no namespace any more, are not among them."""
    try:
        inode = (network.NAMESPACES / namespace).stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        # The process may end at any moment.
        with contextlib.suppress(OSError):
            if (directory / "ns/net").stat().st_ino == inode:
                found.append(_read(directory))
    return sorted(found, key=lambda process: process.pid)


def init_of(namespace: str) -> Process | None:
    """The first process of the machine; None if the machine is not running."""
    # Each command on a machine asks, and looking through all processes costs as much as some commands do.
    with contextlib.suppress(OSError, KeyError):
        directory = Path("/proc", str(_inits[namespace]))
        is_there = (directory / "ns/net").samefile(network.NAMESPACES / namespace)
        if is_there and (process := _read(directory)).inner_pid == 1:
            return process
    found = next((process for process in of_namespace(namespace) if process.inner_pid == 1), None)
    if found is not None:
        _inits[namespace] = found.pid
    return found


def end(namespaces: Iterable[str], timeout: float = 10.0) -> None:
    """SIGKILL everything in these namespaces and wait until it is gone.

    Raises:
        TestbedError: something is still there after `timeout` seconds.
    """
    names = list(namespaces)
    deadline = time.monotonic() + timeout
    while True:
        left = [process for name in names for process in of_namespace(name)]
        if not left:
            return
        if time.monotonic() > deadline:
            raise TestbedError(f"processes do not die: {', '.join(f'{p.pid} {p.name}' for p in left)}")
        kill(left)
        time.sleep(0.02)


def end_first(init: Process, timeout: float = 10.0) -> None:
    """SIGKILL the first process of a process namespace and wait until it is gone, which all others are before it.

    Raises:
        TestbedError: it is still there after `timeout` seconds.
    """
    descriptor = os.pidfd_open(init.pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], timeout)[0]:
            raise TestbedError(f"process does not die: {init.pid} {init.name}")
    finally:
        os.close(descriptor)


def kill(found: Iterable[Process]) -> None:
    """SIGKILL these processes."""
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _read(directory: Path) -> Process:
    fields = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines() if ":" in line)
    uid = int(fields["Uid"].split()[0])
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    command = (directory / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return Process(
        pid=int(directory.name),
        parent=int(fields["PPid"]),
        user=user,
        name=fields["Name"].strip(),
        command=command,
        inner_pid=int(fields["NSpid"].split()[-1]),
    )
