"""Passing HTTP requests on to a server on a Unix socket."""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp

# headers of one connection (RFC 9110, section 7.6.1), and those that aiohttp writes
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding"
    " upgrade expect content-length".split()
)


def forwarded(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers of a message without those of its connection."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


def open_session(socket: str) -> aiohttp.ClientSession:
    """Return a session whose requests go to a Unix socket. Call it in the running loop."""
    return aiohttp.ClientSession(
        "http://server",
        connector=aiohttp.UnixConnector(socket, limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )
