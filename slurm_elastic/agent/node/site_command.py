"""A command of the site or of the user, run by the agent with limits on its time and on what it prints."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from slurm_elastic.text import printable

_KEPT = 4096
"""Bytes at the end of the output that are kept; a command may print any amount."""
_UNKILLABLE = 1.0
"""Seconds to wait for a command that was killed: it may be in uninterruptible sleep."""


class SiteResult(NamedTuple):
    """The end of a command.

    Attributes:
        exit_code: Of the shell, negative for a signal; None if the command was killed because its time was over.
        last_line: The last line that it printed, made safe for a terminal; empty for none.
    """

    exit_code: int | None
    last_line: str
    output: str = ""

    @property
    def problem(self) -> str:
        """One line that says how the command failed; empty if it ended with exit code 0."""
        if self.exit_code == 0:
            return ""
        how = "took too long and was killed" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"{how}: {self.last_line}" if self.last_line else how


def run_site_command(
    command: str,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    content: bytes = b"",
    *,
    interrupt: int | None = None,
) -> SiteResult:
    """Run a command by /bin/sh and return how it ended. No process of its session is left.

    Args:
        environ: Its environment; None for that of this process.
        interrupt: A descriptor; when it becomes readable, the command is killed as if its time was over.
    """
    deadline = time.monotonic() + timeout
    # A file in memory and no pipe: a command that does not read it holds nothing up.
    with os.fdopen(os.memfd_create("stdin"), "w+b", buffering=0) as stdin:
        stdin.write(content)
        stdin.seek(0)
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
    assert process.stdout is not None
    output, exited = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(output, False)
    kept, ended = b"", False
    try:
        poll = select.poll()
        poll.register(output, select.POLLIN)
        poll.register(exited, select.POLLIN)
        if interrupt is not None:
            poll.register(interrupt, select.POLLIN)
        while not ended and (left := deadline - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            ended = exited in ready
            if interrupt in ready:
                break
            if output in ready:
                chunk = _read(output)
                kept = (kept + chunk)[-_KEPT:]
                if not chunk:
                    poll.unregister(output)
    finally:
        # Before its leader is waited for, so that the group cannot be another one's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_UNKILLABLE)
        kept = (kept + _read(output))[-_KEPT:]
        os.close(exited)
        process.stdout.close()
    printed = kept.decode(errors="replace")
    lines = [line for line in printed.splitlines() if line.strip()]
    return SiteResult(process.returncode if ended else None, printable(lines[-1].strip()) if lines else "", printed)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""
