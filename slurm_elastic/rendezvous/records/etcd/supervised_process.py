"""A program that does not outlive the process that started it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_elastic.ownership import write_own

__all__ = ["GuardedProgram"]

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0

# Reads from a pipe of which we hold the other end; end of file without a line means that we died.
_GUARD = """
read -r line && exit
kill -KILL "$1" 2>/dev/null
tries=100
while kill -0 "$1" 2>/dev/null && [ $tries -gt 0 ]; do sleep 0.05; tries=$((tries - 1)); done
[ -z "$2" ] || rm -rf -- "$2"
"""


class GuardedProgram:
    """A program that ends with :meth:`end`, and with this process however that ends: a second process sees to it.

    Args:
        command: with its arguments.
        environment: all of it.
        log: gets everything that it prints.
        belongings: a directory that is deleted when this process ends without having called `end`; None for none.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, belongings: Path | None
    ) -> None:
        with os.fdopen(write_own(log), "wb") as output:
            # In a session of its own, so that a Ctrl-C for us does not end it before we are done with it.
            self._program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", str(self._program.pid), str(belongings or "")],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            self._program.kill()
            self._program.wait()
            raise

    @property
    def pid(self) -> int | None:
        """The process id of the program, None when it does not run any more."""
        return None if self._program.poll() is not None else self._program.pid

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end; after 10 seconds it is killed."""
        self._program.send_signal(number)
        try:
            self._program.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            name = self._program.args[0] if isinstance(self._program.args, Sequence) else ""
            logger.warning("%s (pid %d) did not end within %.0f s; killing it", name, self._program.pid, _END_SECONDS)
            self._program.kill()
            self._program.wait()
        self._guard.communicate(b"\n")
