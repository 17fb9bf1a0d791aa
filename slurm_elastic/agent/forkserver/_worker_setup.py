"""Turns a forked copy of the fork server into a worker: session, files, environment, seeds, command line."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from slurm_elastic.agent.forkserver._linux import set_parent_death_signal, set_task_name

Changes = Mapping[str, tuple[str | None, str | None]]
"""Old and new value of each changed variable, by name; None where it was not set."""


@contextlib.contextmanager
def errors_to(descriptor: int | None) -> Iterator[None]:
    """In a forked process: on any error, write it to this pipe (None: to nowhere) and end the process with 1."""
    try:
        yield
    except BaseException as error:
        if descriptor is not None:
            os.write(descriptor, f"{type(error).__name__}: {error}"[:4000].encode())
        os._exit(1)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    """Return the variables that differ between two environments."""
    names = {*before, *after}
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def change(environment: dict[str, str], by: Changes) -> None:
    """Apply changes to an environment, to those variables that have the old value."""
    for name, (before, after) in by.items():
        if environment.get(name) == before and after is not None:
            environment[name] = after
        elif environment.get(name) == before:
            environment.pop(name, None)


def enter_own_session(fork_server: int) -> None:
    """Move this process to a session of its own, and let the kernel kill it when the fork server ends."""
    os.setsid()
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != fork_server:
        # The fork server ended before the kernel was asked to kill this process with it.
        os.kill(os.getpid(), signal.SIGKILL)


def place_descriptors(descriptors: Mapping[str, int]) -> dict[str, str]:
    """Put standard output and error in place; return the variables that name the descriptors of a function's call."""
    for name, target in (("stdout", 1), ("stderr", 2)):
        if name in descriptors:
            os.dup2(descriptors[name], target)
            os.close(descriptors[name])
    if "call" not in descriptors:
        return {}
    for name in ("call", "result"):
        os.set_inheritable(descriptors[name], True)
    return {"SLURM_ELASTIC_CALL": f"{descriptors['call']}:{descriptors['result']}"}


def execute(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Execute a cold worker in this process; as in subprocess.Popen, signals that Python ignores are reset."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(environment))


def become_fresh_interpreter(
    order: Mapping[str, Any],
    environment: Mapping[str, str],
    descriptors: Mapping[str, int],
    task_name: bytes,
    torch_seed: int | None,
) -> None:
    """Give this copy of the fork server the state of a fresh interpreter after the same imports.

    Only the seed of Python's hashes stays that of the fork server, the same in all its workers.

    Args:
        order: The agent's order to start this worker, see `protocol.Order`.
        environment: The environment of the worker.
        descriptors: Its open files by name: stdout, stderr, call, result.
        task_name: The name that ps shows as comm.
        torch_seed: torch's seed right after its import; None without torch.
    """
    set_task_name(task_name)
    for name, stream in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if name in descriptors and stream is not None:
            _forget_old_file(stream)
    _replace_environment(environment)
    if order["cpus"] is not None:
        os.sched_setaffinity(0, order["cpus"])
    sys.argv[1:] = order["arguments"]
    sys.orig_argv[:] = order["command"]
    _seed_anew(torch_seed)
    if "threading" in sys.modules:
        # Not done after a fork (Lib/threading.py, _after_fork, Python 3.11).
        sys.modules["threading"].main_thread()._set_native_id()
    if "multiprocessing" in sys.modules:
        sys.modules["multiprocessing"].current_process().authkey = os.urandom(32)


def _seed_anew(torch_seed: int | None) -> None:
    """Take new seeds from the system for numpy and torch; `random` does so itself (Lib/random.py, register_at_fork).

    torch seeds its CPU generator when it is loaded (aten/src/ATen/CPUGeneratorImpl.cpp, getDefaultCPUGenerator, 2.13),
    and those of CUDA at their first use. A seed that a preload has set on purpose stays.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if torch_seed is not None and sys.modules["torch"].initial_seed() == torch_seed:
        sys.modules["torch"].default_generator.seed()


def _forget_old_file(stream: TextIO) -> None:
    # `python -u` writes through, straight to a FileIO, which remembers whether its file could seek. The stream itself
    # stays the same object: modules that were imported already hold on to it.
    if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.FileIO):
        raw = io.FileIO(stream.fileno(), "wb", closefd=False)
        raw.name = stream.name
        stream.__init__(  # type: ignore[misc]
            raw, stream.encoding, stream.errors, "\n", line_buffering=stream.line_buffering, write_through=True
        )


def _replace_environment(environment: Mapping[str, str]) -> None:
    # One by one, so that C code sees the same: os.environ calls putenv and unsetenv.
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
