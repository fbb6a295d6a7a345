"""The gateway's defaults with their real durations."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.conversation import Role, say
from headrace.serve.gateway.errors import BadRequest, ContextExceeded
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.rendering.processes import RenderProcesses
from headrace.serve.gateway.rendering.work import RenderWork
from support.gateway_rig import Lines, world
from support.raw_http import head_of, raw_connection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEFAULTS = GatewayConfig()
HANG_S = 60.0
"""Far more than a deadline may be late by."""


REFUSE: Any = partial(ContextExceeded, field="messages", limit=7)
"""In place of a function of this module, which a process would have to import."""


async def test_unfinished_requests_are_refused_after_a_minute_and_others_are_not(model_dir: Path) -> None:
    async with world(model_dir, Lines("ls")) as w:
        client = await w.client()
        path = client.base_url.removeprefix(w.url) + client.wire.path
        head = head_of(path, "Content-Length: 1000")
        began_s = time.monotonic()
        async with raw_connection(w.url, head[:-2]) as half_a_head, raw_connection(w.url, head + b"{") as half_a_body:
            turns = 0
            waiting = {
                asyncio.create_task(one.reader.readuntil(b"\r\n")): seconds
                for one, seconds in (
                    (half_a_head, DEFAULTS.header_timeout_s),
                    (half_a_body, DEFAULTS.body_timeout_s),
                )
            }
            while not all(task.done() for task in waiting):
                assert (await client.say(f"turn {turns}")).status == 200
                turns += 1
                await asyncio.wait(waiting, timeout=5.0, return_when=asyncio.ALL_COMPLETED)
                took_s = time.monotonic() - began_s
                for task, seconds in waiting.items():
                    assert task.done() or took_s < seconds + HANG_S
            for task in waiting:
                assert b" 408 " in task.result()
        assert time.monotonic() - began_s >= min(waiting.values())
        assert (await w.finish()).turns == turns > 5


async def test_a_work_of_half_a_minute_is_refused_after_its_processor_time(model_dir: Path) -> None:
    pool = RenderProcesses(
        model_dir, token_kinds=False, processes=DEFAULTS.render_processes, cpu_s=DEFAULTS.render_cpu_s
    )
    text = "".join(f"word{number} " for number in range(6_000_000))

    def render(said: str) -> RenderWork:
        return RenderWork(
            messages=(say(Role.USER, said),), tools=(), ending=Ending.TURN, max_tokens=10**9, refusal=REFUSE
        )

    try:
        with pytest.raises(BadRequest, match=f"{DEFAULTS.render_cpu_s:g}"):
            await pool.run("heavy", render(text))
        assert len(await pool.run("light", render("go"))) > 0
    finally:
        await pool.aclose()
