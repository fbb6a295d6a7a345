"""Reads the list of workers from an sglang-router (0.3); all other requests go to the workers directly.

Invariant: a router that does not answer changes nothing; a worker that it no longer lists is removed.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import orjson

from headrace.actors.engine_group.config import check_url
from headrace.policies.transport_errors import reason

logger = logging.getLogger(__name__)

ROUTER_TIMEOUT_S = 5.0


async def router_workers(url: str, http: aiohttp.ClientSession) -> tuple[str, ...] | None:
    """Return the base URLs of the router's workers, None when they cannot be read."""
    try:
        async with (
            asyncio.timeout(ROUTER_TIMEOUT_S),
            http.get(url.rstrip("/") + "/workers") as response,
        ):
            status, payload = response.status, await response.read()
        if status != 200:
            raise ValueError(f"status {status}")
        # Workers for prefill or decode alone cannot be sampled from by themselves.
        workers = orjson.loads(payload)["workers"]
        return tuple(check_url(item["url"]) for item in workers if item.get("worker_type", "regular") == "regular")
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("engines.router %s did not list its workers: %s", url, reason(error))
        return None
