"""Linux and C library calls that Python's standard library lacks: prctl, signalfd, on_exit, fields of /proc, memfd."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _succeeded(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, argument: int) -> None:
    _succeeded(_libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))))


def set_parent_death_signal(number: int) -> None:
    """Ask the kernel for this signal when the thread that forked this process ends (prctl(2)); 0 asks for none.

    The setting survives execve and is cleared in a forked child. A parent that died before the call sends nothing:
    compare os.getppid() afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Make this process the new parent of descendants whose own parent ends (prctl(2)); children do not inherit it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_title(title: str) -> None:
    """Let ps show `title` in place of the command line of this process, cut to the bytes that the kernel reserves.

    These are the bytes of the command line and of the settings of a fork server, if they came first in the environment
    (see `boot_environment`), where they are not set any more. Where the kernel does not tell their addresses, nothing
    changes.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc_pid_stat(5): arg_start, arg_end, env_start, env_end are fields 48 to 51; the second one may hold blanks.
        text = Path("/proc/self/stat").read_text()
        start, end, variables, variables_end = (int(field) for field in text[text.rindex(")") + 1 :].split()[45:49])
        if 0 < start < end <= variables < variables_end:
            room = end - start
            first = ctypes.string_at(variables)
            if variables == end and first.startswith(b"SLURM_ELASTIC_WARM="):
                room += len(first) + 1
            # The kernel shows what is beyond the command line if that does not end with a zero (fs/proc/base.c,
            # get_mm_proctitle).
            ctypes.memmove(start, title.encode(errors="surrogateescape")[: room - 1].ljust(room, b"\0"), room)


def flush_c_streams() -> None:
    """Write out what C code has printed, so that a fork does not copy it into the child's buffers."""
    _libc.fflush(None)


def spare_exit_handlers() -> None:
    """Let this process end without the exit handlers that C code has registered until now (destructors of statics).

    exit(3) calls handlers in the reverse order of their registration and passes those of on_exit(3) the exit code. So
    handlers that are registered from here on run as usual, then output is flushed, then _exit(2) ends the process.
    """
    _libc.on_exit(_libc._exit, None)
    _libc.__cxa_atexit(_libc.fflush, None, None)
    # Programs may have given C++'s streams a buffer of their own (std::ios::sync_with_stdio).
    with contextlib.suppress(OSError, AttributeError, ValueError):
        streams = ctypes.CDLL("libstdc++.so.6", os.RTLD_NOW | os.RTLD_NOLOAD)
        for name in ("_ZSt4cout", "_ZSt4clog"):
            stream = ctypes.addressof(ctypes.c_char.in_dll(streams, name))
            _libc.__cxa_atexit(streams._ZNSo5flushEv, ctypes.c_void_p(stream), None)


def silence_c_stderr() -> None:
    """Send to /dev/null what C code prints on its stream stderr from now on; Python writes to the descriptor."""
    _libc.fopen.restype = ctypes.c_void_p
    ctypes.c_void_p.in_dll(_libc, "stderr").value = _libc.fopen(b"/dev/null", b"w")


class ProcessState(NamedTuple):
    """A process, from proc_pid_stat(5)."""

    state: str
    """One letter, such as D for uninterruptible sleep, T for stopped, Z for ended."""
    parent: int
    session: int
    started: int
    """Its start in clock ticks since boot, which differs from that of a later process with the same id."""


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, which may be a zombie; None if there is none, or it is hidden from this user."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # pid (name) state ppid pgrp session ...; the name may itself hold blanks and parentheses.
    fields = text[text.rindex(b")") + 1 :].split()
    return ProcessState(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def children(parent: int) -> list[int]:
    """Return the pids of the children of a process, zombies included.

    Read from /proc/*/stat: /proc/<pid>/task/<tid>/children needs a kernel built with CONFIG_PROC_CHILDREN.
    """
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]  # noqa: PTH208
    return [pid for pid in pids if (state := process_state(pid)) is not None and state.parent == parent]


def ancestors(pid: int) -> Iterator[int]:
    """Yield the pids of a process, of its parent, and so on, as far as /proc shows them to this user."""
    while pid:
        yield pid
        state = process_state(pid)
        pid = 0 if state is None else state.parent


def signal_descriptor(numbers: Iterable[int]) -> int:
    """Return a descriptor that is readable while one of these signals is pending; all have to be blocked."""
    # A sigset_t has 1024 bits (glibc and musl).
    bits = sum(1 << (number - 1) for number in numbers).to_bytes(128, sys.byteorder)
    return _succeeded(_libc.signalfd(-1, bits, os.O_NONBLOCK | os.O_CLOEXEC))


def sent_signals(descriptor: int) -> list[tuple[int, int]]:
    """Read the signals that other processes have sent to this one: number and sender's pid (signalfd(2))."""
    senders = []
    with contextlib.suppress(BlockingIOError):
        while record := os.read(descriptor, 128):
            number, _errno, code, sender = struct.unpack_from("=IiiI", record)
            # Signals that the kernel raises have a code above 0.
            if code <= 0 and sender:
                senders.append((number, sender))
    return senders


def memory_file(data: bytes = b"") -> int:
    """Return the descriptor of a new file in memory with this content, positioned at its start."""
    descriptor = os.memfd_create("slurm-elastic")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_memory_file(descriptor: int) -> bytes:
    """Return the whole content of the file, and close it."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        return file.read()
