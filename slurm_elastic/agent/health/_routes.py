"""The paths of the pages, and the access to them."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from slurm_elastic.agent.health._http import Request, Response

LIVENESS = "/healthz"
OPEN_PAGES = (LIVENESS, "/readyz")
"""Pages without access control."""

_READ = ("GET", "HEAD")


class Pages(Protocol):
    """The contents of the pages."""

    def ready(self) -> tuple[bool, str]:
        """Return whether workers train here, and the state of the agent."""

    def status(self) -> bytes:
        """Return the status page, JSON."""

    def metrics(self) -> tuple[bytes, str]:
        """Return the metrics page and its content type."""

    def stacks(self) -> bytes:
        """Return the stacks of all threads of the workers here and of the agent; takes seconds, called in a thread."""


@dataclass(frozen=True, slots=True)
class Slow:
    """An answer that takes seconds, so that another thread makes it."""

    make: Callable[[], Response]


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why no token is valid."""

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
        request: The request.
        alive: Returns whether the agent is alive, and a line about it.
        pages: The pages.
        token: Token that clients have to send.
        protected: True if all pages but `OPEN_PAGES` require the token; the stacks always require it.
    """
    if not protected and not _is_local(request.host):
        # A web page that has its own name resolve to the loopback would read what its visitor can (DNS rebinding).
        return Response(HTTPStatus.FORBIDDEN, b"ask by localhost or by an address\n")
    if request.path not in (*OPEN_PAGES, "/status", "/metrics", "/stacks"):
        # Also for clients without the token: the names of pages are no secret.
        return Response(HTTPStatus.NOT_FOUND, b"there are /healthz, /readyz, /status, /metrics and /stacks\n")
    if request.method not in _READ:
        return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n", headers=("Allow: GET, HEAD",))
    if request.path == LIVENESS:
        return liveness(*alive())
    if request.path == "/readyz":
        return liveness(*pages.ready())
    if protected or request.path == "/stacks":
        refusal = _refusal(request.authorization, token)
        if refusal is not None:
            return refusal
    if request.path == "/status":
        return Response(HTTPStatus.OK, pages.status(), "application/json")
    if request.path == "/metrics":
        return Response(HTTPStatus.OK, *pages.metrics())
    return Slow(lambda: Response(HTTPStatus.OK, pages.stacks()))


def _is_local(host: str) -> bool:
    if host in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def liveness(positive: bool, text: str) -> Response:
    """Return the answer to a probe."""
    return Response(HTTPStatus.OK if positive else HTTPStatus.SERVICE_UNAVAILABLE, f"{text}\n".encode())


def _refusal(authorization: str, token: str | Refused) -> Response | None:
    if isinstance(token, Refused):
        # Why is in the agent's log: it names files.
        return Response(HTTPStatus.FORBIDDEN, b"there is no token; the agent's log says why\n")
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode()):
        return None
    # RFC 6750, 3
    return Response(
        HTTPStatus.UNAUTHORIZED,
        b"this page requires the header Authorization: Bearer <the run's health token>\n",
        headers=("WWW-Authenticate: Bearer",),
    )
