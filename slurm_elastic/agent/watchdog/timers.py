"""torch's file timers: the lines that clients write, the named pipe for them, and the timers that run.

A line is a JSON object of at most PIPE_BUF bytes, so that writes are whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from slurm_elastic import typed_json

_LONGEST_SCOPE = 512
_BEGINNING = b'{"version"'
"""The beginning of each line of torch 2.13 (FileTimerRequest.to_json). It occurs nowhere else in a line, as a quote
inside a JSON string is escaped."""


class Request(msgspec.Struct, frozen=True, rename={"scope": "scope_id", "expires_at": "expiration_time"}):
    """The request of a client: the fields of a line that count.

    Attributes:
        expires_at: Seconds since 1970 by the wall clock of this machine; negative to release the timer.
        signal: The signal to kill the process with; 0 or less to report only.
    """

    pid: Annotated[int, msgspec.Meta(gt=1, lt=2**31)]
    scope: Annotated[str, msgspec.Meta(max_length=_LONGEST_SCOPE)]
    expires_at: float
    signal: Annotated[int, msgspec.Meta(lt=signal.NSIG)]


class LineReader:
    """Splits the content of the pipe into requests; drops and counts everything else."""

    def __init__(self) -> None:
        self.dropped = 0
        self._rest = b""

    def feed(self, content: bytes) -> list[Request]:
        """Return the requests that are complete now."""
        *lines, rest = (self._rest + content).split(b"\n")
        if len(rest) > select.PIPE_BUF:
            # A process writes without end. A whole request may still begin in what is kept.
            self.dropped += 1
            rest = rest[-select.PIPE_BUF :]
        self._rest = rest
        requests = []
        for line in lines:
            request = _request(line)
            begin = line.rfind(_BEGINNING)
            if request is None and begin > 0:
                # A partial line of another process, followed by a whole one.
                self.dropped += 1
                request = _request(line[begin:])
            if request is None:
                self.dropped += 1
            else:
                requests.append(request)
        return requests


def _request(line: bytes) -> Request | None:
    if len(line) > select.PIPE_BUF:
        return None
    try:
        return typed_json.decode(line, Request)
    except typed_json.JSONError:
        return None


@dataclass(frozen=True, slots=True)
class Timer:
    """One timer that was acquired and not released.

    Attributes:
        started: The start time of the client's process, see `ProcessState`.
        acquired, expires: The watchdog's own time in seconds.
        steps: The number of steps that the worker has taken in its round, if the timer stands for its next step; None
            for a client's timer.
    """

    request: Request
    started: int
    acquired: float
    expires: float
    steps: int | None = None


logger = logging.getLogger("slurm_elastic")

_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
"""Tells workers the path of the pipe."""
_CAPACITY = 1 << 20
"""Bytes, the most that pipe(7) allows to every user. torch's client opens the pipe non-blocking, so a full pipe would
raise an error in the training script."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """A named pipe and its reading end.

    Attributes:
        path: The value of TORCHELASTIC_TIMER_FILE in workers.
        fd: A descriptor for reading, which never meets an end of file and never blocks.
    """

    path: Path
    fd: int

    def close(self) -> None:
        """Close the pipe, and remove it."""
        os.close(self.fd)
        with contextlib.suppress(OSError):
            self.path.unlink()


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Return True if TORCHELASTIC_ENABLE_FILE_TIMER is not set, or 1, which enables torch's own watchdog."""
    return environ.get(_ENABLE, "1") == "1"


def make_pipe(environ: Mapping[str, str], directory: Path) -> Pipe:
    """Make the pipe of this agent.

    Its path is TORCHELASTIC_TIMER_FILE if that is set and no file exists there. Otherwise, for instance if two agents
    of a node were given the same path, it is in the agent's own directory.
    """
    path = environ.get(FILE_VARIABLE)
    if path:
        try:
            return _open(Path(path).absolute())
        except OSError as error:
            logger.warning(
                "no pipe at %s=%s (%s): the watchdog uses one of its own", FILE_VARIABLE, path, error.strerror
            )
    return _open(directory / "timer")


def _open(path: Path) -> Pipe:
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
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _CAPACITY)
    return Pipe(path, fd)
