"""The named pipe of one agent: made once, never in place of something else."""

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

from slurm_elastic.agent.scratch_dir import NodeDirectory

__all__ = ["Pipe", "is_enabled", "make_pipe"]

logger = logging.getLogger("slurm_elastic")

_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
_FILE = "TORCHELASTIC_TIMER_FILE"
_CAPACITY = 1 << 20
"""Bytes, the most that pipe(7) allows to every user. torch's client opens the pipe without blocking, so a full pipe
would raise in the training script."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """A named pipe and its reading end.

    Attributes:
        path: what workers get as TORCHELASTIC_TIMER_FILE.
        fd: open for reading, never at its end; reading does not block.
        directory: that was made for it, None if it lies where the user said.
        variable: name of the variable by which workers learn of the path.
    """

    path: Path
    fd: int
    directory: NodeDirectory | None
    variable: str = _FILE

    def close(self) -> None:
        """Close it and remove what was made."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            self.path.unlink()
        if self.directory is not None:
            self.directory.close()


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Return True if TORCHELASTIC_ENABLE_FILE_TIMER is 1, which switches torch's on, or not set."""
    return environ.get(_ENABLE, "1") == "1"


def make_pipe(environ: Mapping[str, str]) -> Pipe | None:
    """Make the pipe of this agent.

    It is at TORCHELASTIC_TIMER_FILE if that is set and nothing is there. Otherwise, as with a path that two agents of
    one node were given, it is in a new directory, mode 0700; see
    :class:`~slurm_elastic.agent.scratch_dir.NodeDirectory`.

    Returns:
        None, with a line in the log, if no pipe can be made.
    """
    given = environ.get(_FILE)
    if given:
        try:
            return _open(Path(given).absolute(), None)
        except OSError as error:
            logger.warning("no pipe at %s=%s (%s): the watchdog uses one of its own", _FILE, given, error.strerror)
    try:
        directory = NodeDirectory("watchdog")
    except OSError as error:
        logger.warning("no watchdog: no directory for its pipe (%s); mend TMPDIR or give --no-watchdog", error)
        return None
    try:
        return _open(directory.path / "timer", directory)
    except OSError as error:
        directory.close()
        logger.warning("no watchdog: no pipe in %s (%s); mend it or give --no-watchdog", directory.path, error.strerror)
        return None


def _open(path: Path, directory: NodeDirectory | None) -> Pipe:
    # Fails if anything is there.
    os.mkfifo(path, 0o600)
    try:
        # Linux opens a pipe for both at once (fifo(7)): so there is always a writer, and reading never meets an end.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        path.unlink()
        raise
    status = os.fstat(fd)
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        # Where others may write to the directory, one may have been put there meanwhile.
        os.close(fd)
        raise PermissionError(errno.EPERM, "another user has replaced it", str(path))
    with contextlib.suppress(OSError):
        # Refused beyond /proc/sys/fs/pipe-user-pages-soft.
        fcntl.fcntl(fd, getattr(fcntl, "F_SETPIPE_SZ", 1031), _CAPACITY)
    return Pipe(path, fd, directory)
