"""The protocol of torch's file timer: one JSON object per line, at most PIPE_BUF bytes, so that writes are whole."""

from __future__ import annotations

import select
import signal
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from slurm_elastic import typed_json

_LONGEST_SCOPE = 512
_BEGINNING = b'{"version"'
"""The beginning of each line of torch 2.13 (FileTimerRequest.to_json). It occurs nowhere else in a line, as a quote
inside a JSON string is escaped."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a client.

    Attributes:
        pid: The process that hangs when the timer expires.
        scope: The name of the timer.
        expires_at: Seconds since 1970 by the wall clock of this machine; negative to release the timer.
        signal: The signal to kill the process with; 0 or less to report only.
    """

    pid: int
    scope: str
    expires_at: float
    signal: int

    def later(self, seconds: float) -> Request:
        """Return the request with its expiry moved by `seconds`; a release stays as it is."""
        return self if self.expires_at < 0 else replace(self, expires_at=self.expires_at + seconds)


class LineReader:
    """Splits the content of the pipe into requests; drops and counts everything else.

    Attributes:
        dropped: The number of lines, or parts of lines, that were no requests.
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
                # A partial line of another process, followed by a whole one.
                self.dropped += 1
                request = _request(line[begin:])
            if request is None:
                self.dropped += 1
            else:
                requests.append(request)
        return requests


class _Line(msgspec.Struct, frozen=True):
    """The fields of a line that count."""

    pid: Annotated[int, msgspec.Meta(gt=1, lt=2**31)]
    scope_id: Annotated[str, msgspec.Meta(max_length=_LONGEST_SCOPE)]
    expiration_time: float
    signal: Annotated[int, msgspec.Meta(lt=signal.NSIG)]


def _request(line: bytes) -> Request | None:
    if len(line) > select.PIPE_BUF:
        return None
    try:
        fields = typed_json.decode(line, _Line)
    except typed_json.JSONError:
        return None
    return Request(fields.pid, fields.scope_id, fields.expiration_time, fields.signal)
