"""Records the signals of this process from its start; the agent's main loop handles them.

A handler only records which signal came and when. So a second SIGTERM changes nothing, and no signal interrupts a round
change. The command line imports this module before all others, so it imports only what Python has loaded already.

Python runs no handler for a signal that comes between its last look for signals and the system call in which a selector
then waits (Modules/signalmodule.c, 3.11). So Python itself makes `Notices.fd` readable (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from types import FrameType
from typing import NamedTuple

_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that make an agent leave: Slurm's own signal, those of terminals and people, the warnings of
``sbatch --signal``. SIGQUIT is among them because torchrun handles it (torch 2.13, run.py, --signals-to-handle)."""
RECORDED = (*_LEAVE, signal.SIGCONT)
"""All signals that are recorded."""
_MOST = 64
"""The number of signals that are recorded; later ones are dropped."""


class Received(NamedTuple):
    """One signal, with the monotonic time of this process in seconds."""

    signal: signal.Signals
    at: float


class Notices:
    """The signals that this process has received.

    Attributes:
        fd: Readable from a signal, or a write to `wakeup_fd`, until :meth:`drain`; for a selector.
    """

    def __init__(self) -> None:
        self._received: list[Received] = []
        self.fd, self.wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def first(self) -> Received | None:
        """Return the first signal that asks this agent to leave; None before one has come."""
        return next((received for received in self._received if received.signal in _LEAVE), None)

    def all(self) -> tuple[Received, ...]:
        """Return every signal, in the order in which they were recorded.

        Python runs the handlers of signals that come together in the order of their numbers (Modules/signalmodule.c,
        3.11), so the order of two signals within a millisecond is not known.
        """
        return tuple(self._received)

    def drain(self) -> None:
        """Make `fd` unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal; this is the signal handler."""
        if len(self._received) < _MOST:
            self._received.append(Received(signal.Signals(number), time.monotonic()))


_notices: Notices | None = None


def record_signals() -> Notices:
    """Record signals from now on, and ignore them when the process exits; a second call returns the same object.

    Only the main thread may call this.
    """
    global _notices
    if _notices is None:
        _notices = Notices()
        for number in RECORDED:
            signal.signal(number, _notices.note)
        signal.set_wakeup_fd(_notices.wakeup_fd, warn_on_full_buffer=False)
        # A forked process has other uses for the number of this descriptor.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        atexit.register(_ignore_signals)
    return _notices


def _ignore_signals() -> None:
    """Ignore signals at exit: Python restores the default action of signals with a handler, which ends the process.

    Signals that are ignored stay ignored (Modules/signalmodule.c, _PySignal_Fini, 3.11).
    """
    for number in RECORDED:
        signal.signal(number, signal.SIG_IGN)
