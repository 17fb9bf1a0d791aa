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
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MOST_THREADS = 512
_MOST_BYTES = 1 << 20
_TIMEOUT = 5.0


def collect_stacks(pids: Iterable[int]) -> dict[int, str]:
    """Return a description of all threads of each process, by process id.

    py-spy looks at all of them at once, for 5 s at most.
    """
    pids = tuple(pids)
    end = time.monotonic() + _TIMEOUT
    started = [(pid, _start_py_spy(pid)) for pid in pids]
    texts = {pid: _kernel_view(pid) for pid in pids}
    for pid, process in started:
        if process is not None:
            texts[pid] += f"\n== py-spy\n{_finish(process, end)}"
    return texts


def dump_python_stacks(pid: int) -> bool:
    """Let a Python process write the stacks of all its threads to its standard error, and end.

    Its faulthandler does so on SIGABRT without the GIL, also while the main thread hangs in native code. torch's
    @record enables it, and so does PYTHONFAULTHANDLER=1.

    Returns:
        True if the process handles SIGABRT; otherwise no signal was sent.
    """
    if not int(_status(pid, "SigCgt") or "0", 16) & 1 << (signal.SIGABRT - 1):
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
        lines.append(
            f"thread {thread} {_read(pid, thread, 'comm')}: state {_status(pid, 'State', thread) or '?'}, waits in "
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


def _status(pid: int, key: str, thread: int | None = None) -> str:
    lines = _read(pid, thread, "status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")), "")


def _start_py_spy(pid: int) -> subprocess.Popen[bytes] | None:
    program = shutil.which("py-spy")
    if program is None:
        return None
    with contextlib.suppress(OSError):
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return None


def _finish(process: subprocess.Popen[bytes], end: float) -> str:
    note = ""
    try:
        output, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        note = "\n(it took too long and was ended)\n"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output[:_MOST_BYTES].decode(errors="replace") + note


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker of the present round.

    Attributes:
        logs: The directory for its stacks; None for no files.
    """

    pid: int
    rank: int
    local_rank: int
    round: int
    logs: Path | None


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has in RAM; 0 if it has ended."""
    return int((_status(pid, "VmRSS") or "0").split()[0]) * 1024
