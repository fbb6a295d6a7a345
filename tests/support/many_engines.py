"""Several embedded engines in one process: `python -m support.many_engines MODEL ANNOUNCE COUNT [DELAY_S]`.

The first of them answers each call `DELAY_S` late. The process ends with its parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from headrace.policies.cpu_engine.program import CpuEngineConfig, build
from headrace.policies.processes.parent_death import die_with_parent


def late(delay_s: float) -> Middleware:
    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await handler(request)

    return middleware


async def serve(model: Path, announce: Path, count: int, delay_s: float) -> None:
    urls = []
    for index in range(count):
        config = CpuEngineConfig(model=model, seed=index, max_context=256, max_running=8, group_timeout_s=10.0)
        engine, server = build(config)
        engine.start()
        application = server.application()
        if index == 0 and delay_s:
            application.middlewares.append(late(delay_s))
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    partial = announce.with_suffix(".partial")
    partial.write_text(json.dumps(urls))
    partial.replace(announce)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    model, announce, count, *delay = sys.argv[1:]
    asyncio.run(serve(Path(model), Path(announce), int(count), float(delay[0]) if delay else 0.0))
