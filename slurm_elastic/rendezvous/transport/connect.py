"""Connections to an endpoint whose name may have several addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import TypeVar

Endpoint = tuple[str, int]
"""Address or name, and port."""

_TIMEOUT = 1.0
"""Seconds for which the kernel tries one address. It repeats its SYN after 1, 3 and 7 s (tcp(7), tcp_syn_retries), so
an attempt that began while the network was cut waits for seconds after it is whole. A new attempt succeeds at once."""

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


async def reach(make: Callable[[], _Protocol], endpoint: Endpoint) -> tuple[_Protocol, asyncio.Transport, Endpoint]:
    """Connect to the first address of an endpoint that accepts; return protocol, transport, and that address and port.

    asyncio (3.11, base_events.py, create_connection) makes one OSError of the errors of several addresses, whatever
    they were. Most names have several: each line of /etc/hosts counts for IPv6 too, as a mapped address.

    Args:
        make: Makes the protocol of the connection.
        endpoint: Address or name, and port.

    Raises:
        ConnectionRefusedError: All addresses refuse, so no process listens there.
        TimeoutError: asyncio's; an address did not answer within 1 s.
        OSError: Another error of an address, or of the name.
    """
    loop = asyncio.get_running_loop()
    errors: list[Exception] = []
    for address in await _addresses(endpoint):
        try:
            stream = await _connected(address, endpoint[1])
            transport, protocol = await loop.create_connection(make, sock=stream)
        except (OSError, asyncio.TimeoutError) as error:
            errors.append(error)
        else:
            return protocol, transport, (address, endpoint[1])
    raise next((error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0])


async def _connected(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    stream = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(stream, (address, port)), _TIMEOUT)
        except asyncio.TimeoutError:
            # The kernel may have connected while this process waited for a processor; a new attempt would wait again.
            try:
                stream.getpeername()
            except OSError:
                raise asyncio.TimeoutError from None
    except BaseException:
        stream.close()
        raise
    return stream


async def _addresses(endpoint: Endpoint) -> list[str]:
    host, port = endpoint
    try:
        ipaddress.ip_address(host)
    except ValueError:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(_plain(str(info[4][0])) for info in infos))
    return [host]


def _plain(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or address)
