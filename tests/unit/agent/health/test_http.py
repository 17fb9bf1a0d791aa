from __future__ import annotations

from http import HTTPStatus

import pytest

from slurm_elastic.agent.health.http import HTTPError, Request, Response, read_request


def test_a_request() -> None:
    request = read_request(b"\r\nGET /status?a=b HTTP/1.1\r\nHost: N1:80\r\nauthorization:  Bearer abc \r\n\r\n")
    assert request == Request("GET", "/status", "Bearer abc", keep_open=True, host="n1")


@pytest.mark.parametrize(
    ("version", "header", "keep_open"),
    [
        ("1.1", "", True),
        ("1.1", "Connection: close\r\n", False),
        ("1.0", "", False),
        ("1.0", "Connection: Keep-Alive\r\n", True),
    ],
)
def test_the_client_says_whether_it_asks_on(version: str, header: str, keep_open: bool) -> None:
    assert read_request(f"GET / HTTP/{version}\r\n{header}\r\n".encode()).keep_open is keep_open


@pytest.mark.parametrize(
    "content",
    [
        b"hello\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/2.0\r\n\r\n",
        b"GET  /healthz HTTP/1.1\r\n\r\n",
        b"GET http://n1/healthz HTTP/1.1\r\n\r\n",
        b"get /healthz HTTP/1.1\r\n\r\n",
        b"GET /heal\x00thz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n folded: yes\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nAuthorization: a\r\nauthorization: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\nHost: n1\n\nGET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(content: bytes) -> None:
    with pytest.raises(HTTPError) as refused:
        read_request(content)
    assert refused.value.status is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("header", [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Content-Length: -1"])
def test_a_body_is_refused(header: bytes) -> None:
    with pytest.raises(HTTPError) as refused:
        read_request(b"POST /status HTTP/1.1\r\n" + header + b"\r\n\r\n")
    assert refused.value.status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def test_an_answer() -> None:
    response = Response(HTTPStatus.UNAUTHORIZED, b"no\n", headers=("WWW-Authenticate: Bearer",))
    head, _, body = response.encode().partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 401 Unauthorized"
    assert {b"Content-Length: 3", b"Connection: close", b"WWW-Authenticate: Bearer"} <= set(head.split(b"\r\n"))
    assert body == b"no\n"
    assert response.encode(head_only=True).endswith(b"\r\n\r\n")
