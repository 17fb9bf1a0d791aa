"""The part of HTTP/1.1 (RFC 9112) that pages without request bodies need, their paths, and the access to them. Pure."""

from __future__ import annotations

import hmac
import http.client
import io
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_elastic.agent.health.pages import NodePages

MAX_HEAD = 8192
"""Maximum of bytes in the line and headers of a request."""

_END = b"\r\n\r\n"
_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]{0,2000}) HTTP/1\.([01])")


class HTTPError(Exception):
    """Raised for a request that the server answers by an error before it closes the connection."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        authorization: The header of that name; empty for none.
        host: Name or address by which the client has found this server, without the port; empty if it sends none.
    """

    method: str
    path: str
    authorization: str
    keep_open: bool
    host: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[str, ...] = ()

    def encode(self, *, keep_open: bool = False, head_only: bool = False) -> bytes:
        """Return the bytes to send."""
        lines = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            f"Connection: {'keep-alive' if keep_open else 'close'}",
            *self.headers,
        )
        head = "\r\n".join(lines).encode("ascii") + _END
        return head if head_only else head + self.body


def read_request(head: bytes) -> Request:
    """Return the request with these line and headers, the blank line included.

    Raises:
        HTTPError: The bytes are no request, or the request has a body, which no page accepts.
    """
    # A blank line before a request is to be ignored (RFC 9112, 2.2).
    first, _, fields = head.lstrip(b"\r\n").partition(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise HTTPError(HTTPStatus.BAD_REQUEST, "no request")
    try:
        headers = http.client.parse_headers(io.BytesIO(fields))
    except http.client.HTTPException as error:
        raise HTTPError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error)) from None
    if headers.defects or any(len(headers.get_all(name, ())) > 1 for name in ("authorization", "content-length")):
        raise HTTPError(HTTPStatus.BAD_REQUEST, "a malformed header")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise HTTPError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "no page here takes a body")
    connection = headers.get("connection", "").lower()
    return Request(
        method=line[1].decode(),
        path=line[2].decode().partition("?")[0],
        authorization=headers.get("authorization", "").strip(),
        keep_open="close" not in connection and (line[3] == b"1" or "keep-alive" in connection),
        host=re.sub(r":[0-9]*$", "", headers.get("host", "")).strip("[]").lower(),
    )


LIVENESS = "/healthz"
OPEN_PAGES = (LIVENESS, "/readyz")
"""Pages without access control."""

_READ = ("GET", "HEAD")


def find(
    request: Request,
    alive: Callable[[], tuple[bool, str]],
    pages: NodePages,
    token: str | None,
    *,
    protected: bool,
) -> Response | Callable[[], Response]:
    """Return the answer to a request, or the function that makes it if that takes seconds.

    Args:
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
    return lambda: Response(HTTPStatus.OK, pages.stacks())


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


def _refusal(authorization: str, token: str | None) -> Response | None:
    if token is None:
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
