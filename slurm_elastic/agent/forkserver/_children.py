"""The children of the fork server: how a forked copy becomes a worker or works for the agent, and how children end."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from slurm_elastic.agent.forkserver.linux import (
    children,
    sent_signals,
    set_parent_death_signal,
    set_title,
    signal_descriptor,
)
from slurm_elastic.agent.forkserver.protocol import Channel, wait_on
from slurm_elastic.agent.forkserver.worker_command import PACKAGE_ROOT

JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm and people send to jobs."""


class ChildReaper:
    """The workers among the children of this process, and every other descendant that a worker leaves behind.

    A worker that has ended stays a zombie until `sweep`: so the kernel gives its pid, which is also the id of its
    process group, to no other process, and a signal to that group reaches only what the worker has left.
    """

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.kept: set[int] = set()
        """Children that `sweep` does not kill: fork servers that replace this one, and children for the agent."""
        self._ended: set[int] = set()
        self._descriptor = -1
        self._previous_handler: Any = None

    def watch(self) -> None:
        """Make `fileno` readable whenever a child ends (SIGCHLD, which is blocked here as all signals are)."""
        # Where it is ignored the kernel reaps children.
        self._previous_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._descriptor = signal_descriptor([signal.SIGCHLD])

    def forget(self) -> None:
        """In a forked child: undo `watch`."""
        signal.signal(signal.SIGCHLD, self._previous_handler)
        os.close(self._descriptor)

    def fileno(self) -> int:
        """Readable after a child has ended."""
        return self._descriptor

    def exits(self) -> Iterator[tuple[int, int]]:
        """Yield each worker that has ended once: its pid, and its exit code or minus the signal's number."""
        sent_signals(self._descriptor)
        has_exits = False
        for pid in sorted(self.workers - self._ended):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                has_exits = True
                self._ended.add(pid)
                yield pid, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        if not has_exits:
            # A descendant has ended whose own parent had ended before.
            self._reap(self.workers)

    def sweep(self, seconds: float, between: Callable[[], None]) -> list[int]:
        """Kill every descendant, in at most `seconds` seconds, and call `between`, which asks for `exits`, meanwhile.

        Returns the pids of those that have not ended in time (uninterruptible sleep).
        """
        for pid in self.workers:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                # Forked, but setsid has not made it the leader of its group yet.
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                continue
        end = time.monotonic() + seconds
        while True:
            # A worker that has ended is reaped when its exit is known.
            between()
            left = [pid for pid in self._reap(self.workers - self._ended) if pid not in self.kept]
            if not left or time.monotonic() > end:
                return left
            for pid in left:
                with contextlib.suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
            # Until a child ends: its own children become children of this process then (PR_SET_CHILD_SUBREAPER).
            wait_on([self._descriptor], 0.02)
            sent_signals(self._descriptor)

    def _reap(self, spared: Set[int]) -> list[int]:
        """Reap the children that have ended, but for the spared ones, and return the pids of all others.

        Until then the kernel gives the pid of a child to no other process.
        """
        left = []
        for pid in children(os.getpid()):
            if pid not in spared and os.waitpid(pid, os.WNOHANG)[0]:
                for pids in (self.workers, self._ended, self.kept):
                    pids.discard(pid)
            else:
                left.append(pid)
        return left


def changed_alike(
    environment: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, str]:
    """Return an environment with what has changed from `before` to `after`, except variables that had another value."""
    changed = {name for name in {*before, *after} if environment.get(name) == before.get(name) != after.get(name)}
    kept = {name: value for name, value in environment.items() if name not in changed}
    return kept | {name: after[name] for name in changed & after.keys()}


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


def become_fresh_interpreter(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Give this copy of the fork server the state of a fresh interpreter after the same imports.

    Only the seed of Python's hashes stays that of the fork server, the same in all its workers.

    Args:
        command: The whole command of the worker.
    """
    _replace_environment(environment)
    sys.orig_argv[:] = command
    _seed_anew()
    if "threading" in sys.modules:
        # Not done after a fork (Lib/threading.py, _after_fork, Python 3.11).
        sys.modules["threading"].main_thread()._set_native_id()
    if "multiprocessing" in sys.modules:
        sys.modules["multiprocessing"].current_process().authkey = os.urandom(32)


def _seed_anew() -> None:
    """Take new seeds from the system for numpy and torch; `random` does so itself (Lib/random.py, register_at_fork).

    torch seeds its CPU generator when it is loaded (aten/src/ATen/CPUGeneratorImpl.cpp, getDefaultCPUGenerator, 2.13),
    and those of CUDA at their first use.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()


def _replace_environment(environment: Mapping[str, str]) -> None:
    # One by one, so that C code sees the same: os.environ calls putenv and unsetenv.
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def run_agent_child(module: str, descriptor: int, signal_mask: Sequence[int], let_go: Callable[[], None]) -> None:
    """Send the agent a handle of this process, call ``main(descriptor)`` of a module, and end this process.

    `let_go` closes what belongs to the fork server.

    The descriptor is the socket to the agent; its first message is the process id, with a pidfd. The main function
    begins with the signals to jobs blocked, and those that are blocked in the agent.
    """
    code = 1
    try:
        let_go()
        os.setsid()
        handle = os.pidfd_open(os.getpid())
        agent = Channel.inherited(descriptor)
        agent.send({"pid": os.getpid()}, [handle])
        agent.detach()
        os.close(handle)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        os.close(nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*signal_mask, *JOB_SIGNALS})
        # The fork server has forgotten this package, and a script's directory may have modules of the same names.
        sys.path[:] = [PACKAGE_ROOT, *filter(None, sys.path)]
        set_title(f"slurm-elastic {module.rpartition('.')[2]}")
        importlib.import_module(module).main(descriptor)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Python would go on to run the script.
        os._exit(code)
