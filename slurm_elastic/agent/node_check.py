"""The check of a node before its agent joins a run: a quick one of our own, and the command of the site.

It runs in a thread from the first moment on, while the agent imports what it needs.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from slurm_elastic.agent.gpu_check import gpu_problems
from slurm_elastic.agent.signals import Notices
from slurm_elastic.agent.site_command import run_site_command
from slurm_elastic.errors import ExitCode, SlurmElasticError
from slurm_elastic.text import size_text

logger = logging.getLogger("slurm_elastic")

_LEAST_MEMORY = 128 << 20
"""Bytes of memory below which a node starts no worker: torch alone takes more."""
_TIMEOUT = 60.0
_OFF = "off"


class NodeCheckError(SlurmElasticError):
    """This node failed its check: its agent does not join the run."""

    exit_code = ExitCode.FAILED


class NodeCheck:
    """Checks this node in a thread.

    Args:
        command: ``--node-check``: a command for the shell; ``off`` for no check at all; empty for the quick one alone.
        timeout: Seconds for the command.

    Attributes:
        fd: Readable once there is a result.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._problem: str | None = None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A daemon: a command that hangs in the kernel does not hold up the end of the agent.
        threading.Thread(target=self._run, name="slurm-elastic-node-check", daemon=True).start()

    def problem(self, notices: Notices) -> str:
        """Wait for the result, and return what is wrong with this node in one line; empty for nothing.

        Args:
            notices: The signals of this process; one that asks it to leave ends the wait, and the result is empty then.
        """
        while self._problem is None and notices.first() is None:
            select.select([self.fd, notices.fd], [], [])
            notices.drain()
        return self._problem or ""

    def _run(self) -> None:
        try:
            self._problem = self._find()
        except Exception as error:
            # A node that cannot even run its check is none to train on.
            self._problem = f"the check cannot be run: {error}"
        os.eventfd_write(self.fd, 1)

    def _find(self) -> str:
        if self._command == _OFF:
            return ""
        unwritable = _unwritable((Path("/dev/shm"), Path(tempfile.gettempdir())))
        problem = shortcomings(_available_memory(), [*unwritable, *gpu_problems()])
        if problem or not self._command:
            return problem
        message = run_site_command(self._command, self._timeout).problem
        return f"--node-check {message}" if message else ""


def shortcomings(available: int | None, others: Iterable[str]) -> str:
    """Return what a node lacks in one line; empty for nothing. Pure.

    Args:
        available: Bytes of memory that processes can still get; None if that is unknown.
        others: A line for each directory for temporary files that takes none, and for each GPU that is broken.
    """
    problems = list(others)
    if available is not None and available < _LEAST_MEMORY:
        problems.insert(0, f"{size_text(available)} of memory are left")
    return "; ".join(problems)


def tell_site(command: str, node: str, run_id: str, reason: str) -> None:
    """Run ``--on-bad-node``, and log how it failed if it did.

    Args:
        command: For the shell; empty for none.
        node: Slurm's name of the bad node.
        run_id: Id of the run.
        reason: What is wrong with the node, in one line.
    """
    if not command:
        return
    variables = {"SLURM_ELASTIC_NODE": node, "SLURM_ELASTIC_RUN_ID": run_id, "SLURM_ELASTIC_BAD_NODE_REASON": reason}
    problem = run_site_command(command, _TIMEOUT, {**os.environ, **variables}).problem
    if problem:
        logger.warning("--on-bad-node %s", problem)


def _available_memory(source: Path = Path("/proc/meminfo")) -> int | None:
    # proc_meminfo(5)
    try:
        lines = source.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _unwritable(directories: Iterable[Path]) -> list[str]:
    problems = []
    for directory in dict.fromkeys(directories):
        if not directory.is_dir():
            continue
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                # A full tmpfs makes files, and refuses their first page.
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            fix = "mount it writable" if error.errno == errno.EROFS else "make room there"
            fix = "let this user write there" if error.errno in (errno.EACCES, errno.EPERM) else fix
            problems.append(f"no file can be written to {directory}: {error.strerror}; {fix}, or give --node-check=off")
    return problems
