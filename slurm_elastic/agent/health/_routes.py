"""Which page is where, and who may see it."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from slurm_elastic.agent.health._http import Request, Response

__all__ = ["OPEN_PAGES", "Pages", "Refused", "Slow", "find"]

OPEN_PAGES = ("/healthz", "/readyz")
"""What anybody may ask who reaches the port."""

_READ = ("GET", "HEAD")


class Pages(Protocol):
    """What the pages say."""

    def ready(self) -> tuple[bool, str]:
        """Whether workers train here, and what the agent is doing."""

    def status(self) -> bytes:
        """The status page, JSON."""

    def metrics(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""

    def stacks(self) -> bytes:
        """The stacks of all threads of the workers here and of the agent; takes seconds, called in a thread."""


@dataclass(frozen=True, slots=True)
class Slow:
    """An answer that takes a while and has to be made elsewhere than in the server's loop."""

    make: Callable[[], Response]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is no token that could be shown."""

    why: str


def find(
    request: Request,
    alive: Callable[[], tuple[bool, str]],
    pages: Pages,
    token: str | Refused,
    *,
    protected: bool,
) -> Response | Slow:
    """Answer a request.

    Args:
        request: to answer.
        alive: whether the agent lives, and a line about it.
        pages: what to show.
        token: that clients have to show.
        protected: whether it takes the token to see more than `OPEN_PAGES`; the stacks take it always.
    """
    if request.path not in (*OPEN_PAGES, "/status", "/metrics", "/stacks"):
        # Also for those who may not see any: which pages there are is no secret.
        return Response(HTTPStatus.NOT_FOUND, b"there are /healthz, /readyz, /status, /metrics and /stacks\n")
    if request.method not in _READ:
        return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n", headers=("Allow: GET, HEAD",))
    if request.path == "/healthz":
        return _verdict(*alive())
    if request.path == "/readyz":
        return _verdict(*pages.ready())
    if protected or request.path == "/stacks":
        refusal = _refusal(request.authorization, token)
        if refusal is not None:
            return refusal
    if request.path == "/status":
        return Response(HTTPStatus.OK, pages.status(), "application/json")
    if request.path == "/metrics":
        return Response(HTTPStatus.OK, *pages.metrics())
    return Slow(lambda: Response(HTTPStatus.OK, pages.stacks()))


def _verdict(well: bool, text: str) -> Response:
    return Response(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, f"{text}\n".encode())


def _refusal(authorization: str, token: str | Refused) -> Response | None:
    if isinstance(token, Refused):
        return Response(HTTPStatus.FORBIDDEN, f"there is no token: {token.why}\n".encode())
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode()):
        return None
    # RFC 6750, 3
    return Response(
        HTTPStatus.UNAUTHORIZED,
        b"this page takes the header Authorization: Bearer <the run's health token>\n",
        headers=("WWW-Authenticate: Bearer",),
    )
