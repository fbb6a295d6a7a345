"""`/metrics` of a run over HTTP.

Invariants:
- Files are read in a thread, so the event loop goes on; requests that come meanwhile wait for the same reading or the
  next one, and no two read at once.
- The first reading of a long run may take longer than a scrape: the request gets 503, the reading goes on, and a later
  request gets the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from headrace.actors.telemetry.prometheus.run_metrics import OPENMETRICS, PLAIN, Exposition, prefers_openmetrics

PATH: Final = "/metrics"
WAIT_S: Final = 8.0
"""Time that a request waits for a reading; the default time limit of a scrape is 10 s."""


def metrics_handler(
    exposition: Exposition, *, wait_s: float = WAIT_S
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler of aiohttp that answers with the metrics. It must be the only user of `exposition`."""
    reading: dict[bool, asyncio.Task[bytes]] = {}
    one_at_a_time = asyncio.Lock()

    async def render(openmetrics: bool) -> bytes:
        async with one_at_a_time:
            return await asyncio.to_thread(exposition.render, openmetrics=openmetrics)

    async def metrics(request: web.Request) -> web.StreamResponse:
        openmetrics = prefers_openmetrics(",".join(request.headers.getall("Accept", ())))
        task = reading.get(openmetrics)
        if task is None:
            task = reading[openmetrics] = asyncio.create_task(render(openmetrics))
            task.add_done_callback(lambda _: reading.pop(openmetrics, None))
        try:
            body = await asyncio.wait_for(asyncio.shield(task), wait_s)
        except TimeoutError:
            text = f"the ledger is still being read after {wait_s:g} s; ask again\n"
            return web.Response(status=503, text=text, headers={"Retry-After": "10"})
        return web.Response(body=body, headers={"Content-Type": OPENMETRICS if openmetrics else PLAIN})

    return metrics
