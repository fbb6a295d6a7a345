"""The workers of an sglang-router (0.3): only who they are is taken from it, everything else goes to them directly.

Invariant: a router that does not answer changes nothing; a worker that it no longer names is let go.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import aiohttp
import orjson

from headrace.actors.engine_group.config import check_url
from headrace.policies.transport_errors import reason

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

ROUTER_TIMEOUT_S = 5.0


async def router_workers(url: str, http: aiohttp.ClientSession) -> tuple[str, ...] | None:
    """Base URLs of the router's workers; None when it does not tell."""
    try:
        async with (
            asyncio.timeout(ROUTER_TIMEOUT_S),
            http.get(url.rstrip("/") + "/workers") as response,
        ):
            status, payload = response.status, await response.read()
        if status != 200:
            raise ValueError(f"status {status}")
        return tuple(_urls(payload))
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("engines.router %s tells no workers: %s", url, reason(error))
        return None


def _urls(payload: bytes) -> Iterator[str]:
    """Workers that take whole requests; those for prefill or decode alone cannot be sampled from by themselves."""
    for worker in orjson.loads(payload)["workers"]:
        if worker.get("worker_type", "regular") == "regular":
            yield check_url(worker["url"])
