"""The processes of an agent that work on snapshots: how they are started, and that they outlive signals to the job."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PACKAGE_ROOT = Path(__file__).parents[2]
_PROGRAM = (
    f"import sys; sys.path[:] = [{str(_PACKAGE_ROOT)!r}, *filter(None, sys.path)]; "
    "from {module} import main; main(*map(int, sys.argv[1:]))"
)
"""Without the working directory in the path: a script there may have the name of a module that torch imports."""


class Child(Protocol):
    """A process of an agent."""

    def kill(self) -> None:
        """Kill the process, unless it has ended."""

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code, or minus a signal's number."""


Fork = Callable[[str, Callable[[], bool]], "tuple[Child, socket.socket] | None"]
"""Forks a process that calls ``main(descriptor)`` of a module, as :func:`start_child` starts one, from a process that
has imported torch. None if that is not possible, or if the second argument, called every 0.1 s, has returned True."""


def start_child(module: str, *passed: int) -> tuple[Child, socket.socket]:
    """Start a process that calls ``main(descriptor)`` of a module, which begins with :func:`ignore_signals`.

    Args:
        passed: Further descriptors that the process gets, as further arguments.

    Returns:
        The process, and this end of the socket whose other end is the descriptor, for `send` and `receive`.

    Raises:
        OSError: It cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = [theirs.fileno(), *passed]
    command = [sys.executable, "-c", _PROGRAM.replace("{module}", module), *map(str, descriptors)]
    # Slurm sends signals to all processes of a job step. They are blocked until the process ignores them: threads have
    # masks of their own, and children inherit them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=descriptors
            )
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, ours


def ignore_signals() -> None:
    """Ignore the signals that Slurm or a person sends to the job: the agent says when the process ends."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
