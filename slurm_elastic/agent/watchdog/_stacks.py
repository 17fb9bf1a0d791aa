"""Collects the stacks of the threads of a process from outside.

The kernel's view is always available. py-spy, where it is installed, adds Python's frames; it needs permission to trace
(ptrace(2), kernel.yama.ptrace_scope), and its error message is kept, too. gdb is not used: it reads the symbols of
libtorch first, which takes longer than a hung group should wait.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

__all__ = ["collect_stacks", "dump_python_stacks"]

_TOOLS = {
    "py-spy": ["dump", "--nonblocking", "--pid", "{pid}"],
}
_MOST_THREADS = 512
_MOST_BYTES = 1 << 20
_POLL_INTERVAL = 0.05


def collect_stacks(pids: Iterable[int], timeout: float, should_stop: Callable[[], bool]) -> dict[int, str]:
    """Return a description of all threads of each process, by process id; the tools run in parallel.

    Args:
        pids: The processes.
        timeout: Seconds for all tools together.
        should_stop: Called every 0.05 s; returns True if the stacks are not needed any more.
    """
    pids = tuple(pids)
    end = time.monotonic() + timeout
    started = [(pid, name, _start_tool(name, pid)) for pid in pids for name in _TOOLS]
    texts = {pid: _kernel_view(pid) for pid in pids}
    for pid, name, tool in started:
        if tool is not None:
            texts[pid] += f"\n== {name}\n{_finish_tool(*tool, end, should_stop)}"
    return texts


def dump_python_stacks(pid: int) -> bool:
    """Let a Python process write the stacks of all its threads to its standard error, and end.

    Its faulthandler does so on SIGABRT without the GIL, also while the main thread hangs in native code. torch's
    @record enables it, and so does PYTHONFAULTHANDLER=1.

    Returns:
        True if the process handles SIGABRT; otherwise no signal was sent.
    """
    mask = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                mask = int(line.split()[1], 16)
    if not mask & 1 << (signal.SIGABRT - 1):
        return False
    with contextlib.suppress(OSError, ValueError):
        # No core dump of all its memory: a limit of 1 also prevents one that is piped to a program (fs/coredump.c).
        resource.prlimit(pid, resource.RLIMIT_CORE, (1, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGABRT)
        return True
    return False


def _kernel_view(pid: int) -> str:
    try:
        threads = sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    except OSError as error:
        return f"process {pid} cannot be looked at: {error.strerror}\n"
    lines = [f"process {pid}, {len(threads)} threads: {_read(pid, None, 'cmdline')}"]
    for thread in threads[:_MOST_THREADS]:
        states = (line for line in _read(pid, thread, "status").splitlines() if line.startswith("State:"))
        state = next(states, "State: ?").partition(":")[2].strip()
        lines.append(
            f"thread {thread} {_read(pid, thread, 'comm')}: state {state}, waits in "
            f"{_read(pid, thread, 'wchan')}, system call {_read(pid, thread, 'syscall')}"
        )
        # Readable by root only (proc_pid_stack(5)).
        lines.extend(f"    {line}" for line in _read(pid, thread, "stack").splitlines())
    return "\n".join(lines) + "\n"


def _read(pid: int, thread: int | None, name: str) -> str:
    directory = Path(f"/proc/{pid}") if thread is None else Path(f"/proc/{pid}/task/{thread}")
    try:
        return (directory / name).read_bytes()[:65536].replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _start_tool(name: str, pid: int) -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
    program = shutil.which(name)
    if program is None:
        return None
    output = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        command = [program, *(word.format(pid=pid) for word in _TOOLS[name])]
        return (
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ),
            output,
        )
    except OSError:
        output.close()
        return None


def _finish_tool(
    process: subprocess.Popen[bytes], output: IO[bytes], end: float, should_stop: Callable[[], bool]
) -> str:
    note = ""
    while process.poll() is None:
        if time.monotonic() > end or should_stop():
            note = "\n(it took too long and was ended)\n"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_INTERVAL)
    with output:
        output.seek(0)
        return output.read(_MOST_BYTES).decode(errors="replace") + note
