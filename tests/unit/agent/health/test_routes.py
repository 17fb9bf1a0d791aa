from __future__ import annotations

from http import HTTPStatus

import pytest

from slurm_elastic.agent.health.http import Request, Response, find
from slurm_elastic.agent.health.pages import NodePages

TOKEN = "0123456789abcdef"


class Pages(NodePages):
    def __init__(self, ready: bool = True) -> None:
        self._ready = ready

    def ready(self) -> tuple[bool, str]:
        return self._ready, "training in round 3"

    def status(self) -> bytes:
        return b"{}"

    def metrics(self) -> tuple[bytes, str]:
        return b"metrics", "text/plain; version=1.0.0"

    def stacks(self) -> bytes:
        return b"stacks"


def ask(
    path: str,
    *,
    method: str = "GET",
    authorization: str = "",
    protected: bool = True,
    alive: bool = True,
    ready: bool = True,
    token: str | None = TOKEN,
    host: str = "",
) -> Response:
    request = Request(method, path, authorization, keep_open=True, host=host)
    answer = find(request, lambda: (alive, "words"), Pages(ready), token, protected=protected)
    return answer() if callable(answer) else answer


@pytest.mark.parametrize(("well", "status"), [(True, 200), (False, 503)])
def test_liveness_and_readiness_are_for_everybody(well: bool, status: int) -> None:
    assert (ask("/healthz", alive=well).status, ask("/healthz", alive=well).body) == (status, b"words\n")
    assert ask("/readyz", ready=well).status == status


@pytest.mark.parametrize("path", ["/status", "/metrics", "/stacks"])
@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer 0123456789abcdeg", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}\xff"],
)
def test_everything_else_takes_the_token(path: str, authorization: str) -> None:
    refused = ask(path, authorization=authorization)
    assert refused.status == HTTPStatus.UNAUTHORIZED
    assert refused.headers == ("WWW-Authenticate: Bearer",)
    assert TOKEN.encode() not in refused.body
    assert ask(path, authorization=f"bearer {TOKEN}").status == HTTPStatus.OK


def test_on_the_loopback_only_the_stacks_take_it() -> None:
    assert ask("/status", protected=False) == Response(HTTPStatus.OK, b"{}", "application/json")
    assert ask("/metrics", protected=False).content_type == "text/plain; version=1.0.0"
    assert ask("/stacks", protected=False).status == HTTPStatus.UNAUTHORIZED
    assert ask("/stacks", protected=False, authorization=f"Bearer {TOKEN}").body == b"stacks"


@pytest.mark.parametrize(
    ("host", "local"),
    [("", True), ("localhost", True), ("127.0.0.1", True), ("::1", True), ("evil.example", False), ("n1", False)],
)
def test_on_the_loopback_a_name_of_somebody_else_is_refused(host: str, local: bool) -> None:
    for path in ("/status", "/metrics", "/healthz"):
        assert ask(path, protected=False, host=host).status == (HTTPStatus.OK if local else HTTPStatus.FORBIDDEN)
        assert ask(path, authorization=f"Bearer {TOKEN}", host=host).status == HTTPStatus.OK


def test_without_a_token_nobody_gets_in() -> None:
    refused = ask("/stacks", authorization="Bearer ", token=None)
    # Nothing that tells a stranger where the run's files are.
    assert (refused.status, refused.body) == (HTTPStatus.FORBIDDEN, b"there is no token; the agent's log says why\n")


def test_other_pages_and_methods() -> None:
    assert ask("/favicon.ico").status == HTTPStatus.NOT_FOUND
    assert ask("/status/..").status == HTTPStatus.NOT_FOUND
    for method in ("POST", "DELETE", "OPTIONS"):
        refused = ask("/healthz", method=method)
        assert (refused.status, refused.headers) == (HTTPStatus.METHOD_NOT_ALLOWED, ("Allow: GET, HEAD",))
