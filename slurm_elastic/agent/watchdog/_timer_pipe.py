"""The named pipe of one agent, which replaces no existing file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.agent.scratch_dir import SHARED_MEMORY, NodeDirectory

logger = logging.getLogger("slurm_elastic")

_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
_FILE = "TORCHELASTIC_TIMER_FILE"
_CAPACITY = 1 << 20
"""Bytes, the most that pipe(7) allows to every user. torch's client opens the pipe non-blocking, so a full pipe would
raise an error in the training script."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """A named pipe and its reading end.

    Attributes:
        path: The value of TORCHELASTIC_TIMER_FILE in workers.
        fd: A descriptor for reading, which never meets an end of file and never blocks.
        directory: The directory that was made for the pipe; None if the user has chosen the path.
        variable: The name of the variable that tells workers the path.
    """

    path: Path
    fd: int
    directory: NodeDirectory | None
    variable: str = _FILE

    def close(self) -> None:
        """Close the pipe, and remove it with its directory."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            self.path.unlink()
        if self.directory is not None:
            self.directory.close()


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Return True if TORCHELASTIC_ENABLE_FILE_TIMER is not set, or 1, which enables torch's own watchdog."""
    return environ.get(_ENABLE, "1") == "1"


def make_pipe(environ: Mapping[str, str], memory: Path = SHARED_MEMORY) -> Pipe | None:
    """Make the pipe of this agent.

    Its path is TORCHELASTIC_TIMER_FILE if that is set and no file exists there. Otherwise, for instance if two agents
    of a node were given the same path, it is in a new directory with mode 0700; see
    :class:`~slurm_elastic.agent.scratch_dir.NodeDirectory`.

    Args:
        environ: The environment of the agent.
        memory: See `NodeDirectory`.

    Returns:
        The pipe; None, with a line in the log, if it cannot be made.
    """
    path = environ.get(_FILE)
    if path:
        try:
            return _open(Path(path).absolute(), None)
        except OSError as error:
            logger.warning("no pipe at %s=%s (%s): the watchdog uses one of its own", _FILE, path, error.strerror)
    try:
        directory = NodeDirectory("watchdog", memory)
    except OSError as error:
        logger.warning("no watchdog: no directory for its pipe (%s); fix TMPDIR or give --no-watchdog", error)
        return None
    try:
        return _open(directory.path / "timer", directory)
    except OSError as error:
        directory.close()
        logger.warning("no watchdog: no pipe in %s (%s); fix it or give --no-watchdog", directory.path, error.strerror)
        return None


def _open(path: Path, directory: NodeDirectory | None) -> Pipe:
    # Fails if the path exists.
    os.mkfifo(path, 0o600)
    try:
        # Linux opens a pipe for reading and writing (fifo(7)): so there is always a writer, and no end of file.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        path.unlink()
        raise
    status = os.fstat(fd)
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        # Another user who may write to the directory has replaced the pipe.
        os.close(fd)
        raise PermissionError(errno.EPERM, "another user has replaced it", str(path))
    with contextlib.suppress(OSError):
        # The kernel refuses it beyond /proc/sys/fs/pipe-user-pages-soft.
        fcntl.fcntl(fd, getattr(fcntl, "F_SETPIPE_SZ", 1031), _CAPACITY)
    return Pipe(path, fd, directory)
