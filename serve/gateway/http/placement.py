"""Where sessions and gateways are: processes by the ids of sessions, so that nobody needs a table, and ports that
survive restarts."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path


def place_of(session_id: str, places: int) -> int:
    """Return the number of the process that has a session, from 0. It is the same on every machine."""
    return zlib.crc32(session_id.encode("utf-8", "surrogatepass")) % places


def most_processes() -> int:
    """Return the number of cores that this process may use: more gateway processes would only take turns."""
    return len(os.sched_getaffinity(0))


def stable_ports() -> Iterator[int]:
    """Yield ports from 10,000 outside the range for outgoing connections, in random order."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [*range(10_000, first), *range(last + 1, 1 << 16)]
    yield from random.sample(outside, len(outside))


def token_prefix(place: int) -> str:
    """Return the beginning of the tokens of the sessions that a process has."""
    return f"{place}."


def place_of_token(token: str) -> int | None:
    """Return the number of the process that has the session with this token; None if the token names none."""
    number, dot, _ = token.partition(".")
    return int(number) if dot and number.isascii() and number.isdigit() and len(number) < 4 else None
