"""Finds threads that prevent a fork: those of libraries that do not start them again in the forked process.

A forked process has only the thread that forked it. Some libraries handle that and start their threads again where they
are needed. Most of them end their threads before a fork: OpenBLAS does, under numpy and scipy (openblas_fork_handler in
driver/others/memory.c, pthread_atfork, 0.3.30). The others are listed here. The library that such a thread belongs to
is known by the return addresses on its stack (`/proc/self/task/<id>/syscall` has the stack pointer of a thread that
waits, proc_pid_syscall(5)), which alone prove nothing: glibc gives a new thread the stack of one that has ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from typing import NamedTuple

_STACK = 64 << 10
"""Bytes of a stack that are searched."""
_SETTLED = 0.3
"""Seconds until an idle thread waits in a system call."""


class _Origin(NamedTuple):
    library: re.Pattern[str]
    """Matches the path of a library whose code the thread's stack refers to."""
    name: re.Pattern[str]
    """Matches the thread's name."""


_SAFE = (
    # jemalloc starts its background thread again in a forked process, see background_thread_postfork_child in
    # src/background_thread.c of jemalloc 5.3; Arrow has it built in (cpp/src/arrow/memory_pool_jemalloc.cc) under
    # pyarrow.
    _Origin(re.compile(r"/(libarrow|libjemalloc)[^/]*\.so"), re.compile(r"jemalloc_bg_thd")),
)


def threads() -> set[str]:
    """Return the ids of this process's threads."""
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208


def unknown_threads() -> list[str]:
    """Return the names of the threads, beside the first, that are not known to be started again after a fork.

    Forks once if there are any: libraries that handle forks end their threads at that moment, or keep those of `_SAFE`.
    """
    if not _unknown():
        return []
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    end = time.monotonic() + _SETTLED
    while (names := _unknown()) and time.monotonic() < end:
        # The stack of a running thread is not known.
        time.sleep(0.01)
    return names


def _unknown() -> list[str]:
    mappings = _mappings()
    names = []
    for task in threads():
        if int(task) == os.getpid():
            continue
        name, libraries = "", set[str]()
        # Where the stack cannot be read, nothing says that the thread is a known one. One that has ended is not listed
        # when `unknown_threads` looks again.
        with contextlib.suppress(OSError):
            name = _text(f"/proc/self/task/{task}/comm").strip()
            libraries = _libraries_on_stack(task, mappings)
        if not any(
            origin.name.fullmatch(name) and any(origin.library.search(library) for library in libraries)
            for origin in _SAFE
        ):
            names.append(name)
    return sorted(names)


class _Mapping(NamedTuple):
    start: int
    end: int
    library: str
    """The library, if `_SAFE` names it; else empty."""


def _libraries_on_stack(task: str, mappings: list[_Mapping]) -> set[str]:
    fields = _text(f"/proc/self/task/{task}/syscall").split()
    if len(fields) < 3:
        # The thread is running.
        return set()
    stack, counter = int(fields[-2], 16), int(fields[-1], 16)
    # Read no further than this mapping: another thread's stack may follow.
    length = next((mapping.end - stack for mapping in mappings if mapping.start <= stack < mapping.end), 0)
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        data = os.pread(memory.fileno(), min(length, _STACK), stack)
    words = [counter, *struct.unpack(f"={len(data) // 8}Q", data[: len(data) // 8 * 8])]
    code = [mapping for mapping in mappings if mapping.library]
    return {mapping.library for word in words for mapping in code if mapping.start <= word < mapping.end}


def _mappings() -> list[_Mapping]:
    found = []
    for line in _text("/proc/self/maps").splitlines():
        fields = line.split(None, 5)
        library = fields[5] if len(fields) == 6 and "x" in fields[1] else ""
        known = library if any(origin.library.search(library) for origin in _SAFE) else ""
        start, _dash, end = fields[0].partition("-")
        found.append(_Mapping(int(start, 16), int(end, 16), known))
    return found


def _text(path: str) -> str:
    with open(path, errors="replace") as file:  # noqa: PTH123
        return file.read()
