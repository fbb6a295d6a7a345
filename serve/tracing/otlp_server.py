"""An OTLP/HTTP receiver on loopback, for programs that a process of the service starts itself."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from headrace.serve.tracing.foreign_spans import OtlpUnreadable, SpanIntake, engine_span

MAX_BODY_BYTES: Final = 16 << 20
"""Limit for one request; the SDK sends at most 512 spans in one."""


@asynccontextmanager
async def otlp_server(intake: SpanIntake) -> AsyncIterator[str]:
    """Take the spans of engines; yield the URL of the receiver. It has a secret, since every user of the host reaches
    loopback."""

    async def take(request: web.Request) -> web.Response:
        try:
            body, content_type = await intake.take(await request.read(), request.content_type, engine_span)
        except OtlpUnreadable as error:
            return web.Response(status=400, text=str(error))
        return web.Response(body=body, content_type=content_type)

    app, path = web.Application(client_max_size=MAX_BODY_BYTES), f"/{secrets.token_urlsafe(16)}/v1/traces"
    app.router.add_post(path, take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()
