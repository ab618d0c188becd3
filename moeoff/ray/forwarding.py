"""What ingress and replicas say to each other: a request as it came, what makes it belong to a conversation, and the beginning of an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Forwarded", "Head", "Taken", "affinity_key", "passed_on"]

_BEGINNING = 256  # characters of a bare prompt; what is longer grows from turn to turn
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "host",
               "content-length", "content-encoding", "accept-encoding", "server", "date"}  # fmt: skip


@dataclass(frozen=True)
class Forwarded:
    """An HTTP request. affinity: requests with the same one want the same replica; None: any."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    affinity: str | None


@dataclass(frozen=True)
class Taken:
    """First of what a replica answers: who it is."""

    replica: str


@dataclass(frozen=True)
class Head:
    """Second: status and headers. What follows is the body in pieces."""

    status: int
    headers: tuple[tuple[str, str], ...]
    streamed: bool


def passed_on(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Without those that belong to one connection."""
    return tuple((name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP)


def affinity_key(body: bytes) -> str | None:
    """The same for all turns of a conversation, from what they have in common: the messages up to the first of the user, or how a bare prompt begins.

    A client that knows better says it, in OpenAI's `prompt_cache_key`.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None  # the replica will say what is wrong with it
    if not isinstance(asked, dict):
        return None
    if isinstance(named := asked.get("prompt_cache_key"), str):
        return _digest(named)
    beginning = [asked[name] for name in ("system", "instructions") if asked.get(name)]
    for name in ("messages", "input", "prompt", "input_prefix"):
        if said := asked.get(name):
            return _digest([beginning, _first_turn(said)])
    return None


def _first_turn(said: Any) -> Any:
    if isinstance(said, str):
        return said[:_BEGINNING]
    if isinstance(said, list):
        for n, message in enumerate(said):
            if not isinstance(message, dict):
                return said[:_BEGINNING]
            if message.get("role") == "user":
                return said[: n + 1]
    return said


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
