"""The scripted engine of the gateway bench: SGLang's /generate and Anthropic's API with prepared answers.

Invariants:
- Every answer takes `delay_s`, and uses almost no processor time.
- `/v1/messages` is the direct connection: the agent's request is read and answered without a gateway in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import cycle
from typing import Self

import orjson
from aiohttp import web

from benches.gateway.workload import Answer
from headrace.serve.gateway.conversation import Reasoning, Text, ToolCall, TurnAnswer, TurnEnd, TurnRequest
from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.dialect import WireRequest

_VERSION = "1.0"


class ScriptedEngine:
    """HTTP server that returns prepared answers; an async context manager that sets `url`. `delay_s` may be changed at
    any time."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.delay_s = 0.0
        self.url = ""
        self._answers = cycle(answers)
        self._streamed = _streamed()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._nothing)
        app.router.add_post("/v1/messages", self._message)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        await asyncio.sleep(self.delay_s)
        answer = next(self._answers)
        length = len(answer.ids)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": answer.ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": length,
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": _VERSION,
            "weight_versions": [{"version": _VERSION, "start": 0, "end": length}],
            "output_token_logprobs": [[-0.5, token, None] for token in answer.ids],
            "output_token_logprobs_length": length,
        }
        reply = {"text": answer.text, "output_ids": answer.ids, "meta_info": meta}
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    async def _message(self, request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(self.delay_s)
        return web.Response(body=self._streamed, content_type="text/event-stream")

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})


def _streamed() -> bytes:
    """Return the stream that the gateway writes for an answer of this kind."""
    call = ToolCall("call_1", "Bash", '{"command":"sed -n 1p calc.py","description":"Show the first line"}')
    blocks = (Reasoning("The first line says it. " * 7, "turn-1"), Text("I look at the first line. " * 3), call)
    turn = TurnAnswer(turn_id="turn-1", blocks=blocks, end=TurnEnd.CALLS, prompt_tokens=1000, completion_tokens=100)
    request = WireRequest(turn=TurnRequest(messages=()), stream=True, model="policy")
    return AnthropicMessages().stream(request, turn, created_s=0)
