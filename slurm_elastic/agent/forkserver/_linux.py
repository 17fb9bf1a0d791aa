"""Linux and C library calls that Python's standard library lacks: prctl, signalfd, on_exit, fields of /proc, memfd.

Beside them stand the reading of objects without running their code, and what keeps gloo's groups from hanging at exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_parent_death_signal(number: int) -> None:
    """Ask the kernel for this signal when the thread that forked this process ends (prctl(2)); 0 asks for none.

    The setting survives execve and is cleared in a forked child. A parent that died before the call sends nothing:
    compare os.getppid() afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Make this process the new parent of descendants whose own parent ends (prctl(2)); children do not inherit it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_task_name(name: bytes) -> None:
    """Set the name that ps shows as comm; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name)


def set_title(title: str, variable: str) -> None:
    """Let ps show `title` in place of the command line of this process, cut to the bytes that the kernel reserves.

    These are the bytes of the command line and of `variable`, if that came first in the environment; it must not be set
    any more. Where the kernel does not tell their addresses, nothing changes.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc_pid_stat(5): arg_start, arg_end, env_start, env_end are fields 48 to 51; the second one may hold blanks.
        text = Path("/proc/self/stat").read_text()
        start, end, variables, variables_end = (int(field) for field in text[text.rindex(")") + 1 :].split()[45:49])
        if 0 < start < end <= variables < variables_end:
            room = end - start
            first = ctypes.string_at(variables)
            if variables == end and first.startswith(variable.encode() + b"="):
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


def children(parent: int) -> list[int]:
    """Return the pids of the children of a process, zombies included.

    Read from /proc/*/stat: /proc/<pid>/task/<tid>/children needs a kernel built with CONFIG_PROC_CHILDREN.
    """
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and _stat_field(int(entry), 1) == parent]  # noqa: PTH208


def ancestors() -> list[int]:
    """Return the pids of this process's parent, its parent, and so on, as far as /proc shows them to this user."""
    parents: list[int] = []
    parent: int | None = os.getppid()
    while parent:
        parents.append(parent)
        try:
            parent = _stat_field(parent, 1)
        except OSError:
            break
    return parents


def signal_descriptor(numbers: Iterable[int]) -> int:
    """Return a descriptor that is readable while one of these signals is pending; all have to be blocked."""
    # A sigset_t has 1024 bits (glibc and musl).
    bits = sum(1 << (number - 1) for number in numbers).to_bytes(128, sys.byteorder)
    descriptor: int = _libc.signalfd(-1, bits, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


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


def session_of(pid: int) -> int | None:
    """Return the session id of a process, which may be a zombie; None if there is no such process."""
    return _stat_field(pid, 3)


def _stat_field(pid: int, index: int) -> int | None:
    # proc_pid_stat(5): pid (name) state ppid pgrp session ...; the name may itself hold blanks and parentheses.
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text[text.rindex(b")") + 1 :].split()[index])


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


# Reads modules and types of objects without running code of these objects.
#
# `isinstance` asks an object of another type for its ``__class__``, and `vars` asks a module for its ``__dict__``: a
# lazy proxy imports something then. All modules of this package that look at a script's objects use these functions.
_NAMESPACE: Any = vars(ModuleType)["__dict__"]


def has_type(value: object, types: tuple[type, ...]) -> bool:
    """Return whether the type of a value is one of these or derived from one.

    Args:
        value: Any object; none of its attributes is read.
        types: Classes without a metaclass of their own.
    """
    return issubclass(type(value), types)


def namespace_of(module: object) -> dict[str, Any] | None:
    """Return the namespace of a module; None for another object, which may be in `sys.modules`, too."""
    if not has_type(module, (ModuleType,)):
        return None
    namespace: dict[str, Any] = _NAMESPACE.__get__(module)
    return namespace


# Keeps a worker from hanging in the destructor of a process group of gloo.
#
# The fork server calls `keep_owned_groups` once, before other modules import torch's functions. Invariant: Python
# frees each process group that a DistributedDataParallel owned when the script destroyed it.
def keep_owned_groups() -> None:
    """Let torch's destroy_process_group keep the groups that a DistributedDataParallel still owns.

    gloo's thread needs the GIL to free the work of the last collective, and ~ProcessGroupGloo waits for that thread.
    The last Python reference to a group releases the GIL for that (IntrusivePtrNoGilDestructor), but a c10d::Reducer
    that owns the group last does not (~Reducer, torch 2.13): the worker hangs where gloo's thread waits for the GIL.
    Of the runs of torch's DDP tutorial 18 % hang so if torch._dynamo is imported before the script.
    """
    distributed = sys.modules["torch.distributed"]
    implementation: Any = sys.modules["torch.distributed.distributed_c10d"]
    destroy: Callable[..., Any] = implementation.destroy_process_group
    model_type: type = sys.modules["torch.nn.parallel"].DistributedDataParallel
    kept: list[object] = []

    @functools.wraps(destroy)
    def destroy_process_group(*arguments: Any, **options: Any) -> Any:
        # Groups whose models are gone lose their last reference here.
        kept[:] = _owned_groups(model_type)
        return destroy(*arguments, **options)

    for module in (distributed, implementation):
        vars(module)["destroy_process_group"] = destroy_process_group


def _owned_groups(model_type: type) -> list[object]:
    """Return the process groups of all models of this type, without running code of the script."""
    models = [value for value in gc.get_objects() if has_type(value, (model_type,))]
    return [object.__getattribute__(model, "__dict__").get("process_group") for model in models]


_MARKS = ("SLURM_ELASTIC_WARM", "SLURM_ELASTIC_ROUND")
"""Variables that a process has only if it was forked from the fork server, or executed by a worker."""


def kill_orphans(sessions: Collection[int], timeout: float, spared: Collection[int] = ()) -> dict[int, int]:
    """Kill and reap the children of this process that belong to workers, and what they leave behind in turn.

    Args:
        sessions: The ids of the workers' sessions.
        timeout: Seconds after which processes are left that do not end (uninterruptible sleep).
        spared: The pids of processes that are no workers'.

    Returns:
        The exit codes, or minus signal numbers, of the reaped processes by pid.
    """
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout

    def is_orphan(pid: int) -> bool:
        return pid not in spared and (session_of(pid) in sessions or _is_marked(pid))

    while left := [pid for pid in children(os.getpid()) if is_orphan(pid)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    return codes


def _is_marked(pid: int) -> bool:
    """Return whether a process was started with the environment of a worker; a session of its own does not hide that.

    The agent's other children (scontrol, py-spy) were not. If the agent itself runs in a worker, they were, too; then
    only sessions count.
    """
    if any(name in os.environ for name in _MARKS):
        return False
    try:
        # The environment that it, or the process that it was forked from, was executed with (proc_pid_environ(5)).
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(os.fsdecode(entry.partition(b"=")[0]) in _MARKS for entry in environment.split(b"\0"))
