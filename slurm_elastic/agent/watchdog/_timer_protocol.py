"""The protocol of torch's file timer: one JSON object per line, at most PIPE_BUF bytes, so that writes are whole."""

from __future__ import annotations

import json
import math
import select
import signal
from dataclasses import dataclass, replace

__all__ = ["LineReader", "Request"]

_LONGEST_SCOPE = 512
_BEGINNING = b'{"version"'
"""How a line of torch 2.13 begins (FileTimerRequest.to_json). A quote inside a JSON string is escaped, so this is
nowhere else in a line."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a client.

    Attributes:
        pid: the process that hangs when the timer expires.
        scope: the name of the timer.
        expires_at: by the wall clock of this machine, seconds since the epoch; negative to release the timer.
        signal: to kill the process with; 0 or less to report only.
    """

    pid: int
    scope: str
    expires_at: float
    signal: int

    def later(self, seconds: float) -> Request:
        """The same, to expire so much later."""
        return self if self.expires_at < 0 else replace(self, expires_at=self.expires_at + seconds)


class LineReader:
    """Takes what comes out of the pipe apart. Whatever is no request is dropped and counted.

    Attributes:
        dropped: how many lines, or rests of lines, were no requests.
    """

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
                # Half a line of another process before a whole one.
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
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    pid, scope = record.get("pid"), record.get("scope_id")
    expires_at, number = record.get("expiration_time"), record.get("signal")
    if not (isinstance(scope, str) and len(scope) <= _LONGEST_SCOPE):
        return None
    if not (type(pid) is int and 1 < pid < 2**31 and type(number) is int and number < signal.NSIG):
        return None
    if not isinstance(expires_at, int | float) or isinstance(expires_at, bool):
        return None
    try:
        seconds = float(expires_at)
    except OverflowError:
        return None
    return Request(pid, scope, seconds, number) if math.isfinite(seconds) else None
