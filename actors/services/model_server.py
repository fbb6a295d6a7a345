"""The server of a helper model: Chat Completions over an engine of its own.

Invariants:
- The engine belongs to no run: it gets no weights and no request of the policy.
- Each request is rendered and sampled alone. Nothing of it is recorded or trained.
- The request's temperature and top_p are used, unlike those of agents.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NoReturn

import aiohttp
from aiohttp import web

from headrace.actors.errors import first_cause
from headrace.actors.services.local_server import ListenOptions, LocalServer
from headrace.actors.services.started import model_digest
from headrace.policies.engine import Engine, EngineId, GenerateRequest, RequestId
from headrace.policies.errors import EngineError, EngineUnavailable, TemplateRefused
from headrace.policies.processes.server_process import ServerProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.serve.gateway.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import TurnAnswer
from headrace.serve.gateway.dialects import fields
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import WireRequest
from headrace.serve.gateway.errors import BadRequest, InfraError, WireError
from headrace.serve.gateway.http.bodies import read_body
from headrace.serve.gateway.parsing.parser_choice import choose_parser
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer

FOREIGN_VERSION: Final = "0.0"
_CHAT: Final = ChatCompletions()


async def serve_model(
    model: Path, process: ServerProcess, options: ListenOptions, announce: Callable[[str], None]
) -> None:
    """Start the engine, and serve it as `LocalServer.serve` does. Ends when the engine ends. Raises ConfigError,
    PolicyError."""
    key = options.prepare()
    digest, renderer = model_digest(model), load_renderer(model)
    async with process, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        config = SGLangConfig(vocab_size=renderer.vocab_size, foreign_version=FOREIGN_VERSION)
        engine = SGLangEngine(EngineId(process.name), process.url, http, config)
        context = (await engine.info()).max_context_tokens
        server = ModelServer(renderer, engine, context, digest=digest, key=key)

        async def until_the_engine_ends() -> NoReturn:
            code = await process.wait()
            raise EngineUnavailable(f"the engine exited by itself with code {code}: {process.log_tail()}")

        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(until_the_engine_ends())
                await server.serve(options, announce)
                watching.cancel()
        except ExceptionGroup as group:
            raise first_cause(group) from None


class ModelServer(LocalServer):
    """The server over an engine. `context_tokens` is the engine's context length."""

    max_body_bytes = 16 << 20

    def __init__(
        self, renderer: Renderer, engine: Engine, context_tokens: int, *, digest: str, key: str | None = None
    ) -> None:
        super().__init__(digest=digest, key=key)
        self._renderer, self._engine = renderer, engine
        self._context_tokens = context_tokens
        self._parser = choose_parser("auto", renderer.template)
        self._numbers = itertools.count(1)

    def _routes(self) -> Iterable[web.RouteDef]:
        return (web.post("/v1/chat/completions", self._complete), web.get("/v1/models", self._models))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(_CHAT.models(int(time.time())))

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            body = await read_body(request, self.max_body_bytes)
            asked, sampling = _CHAT.parse(body, request.headers), parse_sampling(body)
            answer = await self._answer(asked, sampling)
        except WireError as error:
            return web.json_response(_CHAT.error(error), status=_CHAT.status(error))
        created_s = int(time.time())
        if asked.stream:
            # The whole answer in one piece: helpers are asked for answers, and not watched.
            return web.Response(body=_CHAT.stream(asked, answer, created_s=created_s), content_type="text/event-stream")
        return web.json_response(_CHAT.answer(asked, answer, created_s=created_s))

    async def _answer(self, asked: WireRequest, sampling: Sampling) -> TurnAnswer:
        """Return the answer to one request. Raises WireError."""
        name = f"helper-{next(self._numbers)}"
        budgets = Budgets(max_tokens_per_turn=self._context_tokens, max_context_tokens=self._context_tokens)
        core = Session(SessionSpec(session_id=SessionId(name), sampling=sampling, budgets=budgets), opened_at=0.0)
        match = core.match(asked.turn)
        try:
            delta = await asyncio.to_thread(core.delta, match, asked.turn, self._renderer)
        except TemplateRefused as error:
            raise BadRequest(f"These messages cannot be rendered: {error}", "messages") from None
        plan = core.plan(match, asked.turn, delta)
        wanted = GenerateRequest(
            request_id=RequestId(name),
            input_ids=plan.prompt_ids,
            max_new_tokens=plan.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=asked.turn.stop,
            stop_token_ids=self._renderer.stop_ids,
        )
        try:
            completion = await self._engine.generate(wanted)
        except EngineError as error:
            raise InfraError(f"The engine failed: {error}") from error
        return core.recorded(core.next_turn_id(), plan, completion, self._renderer, self._parser).answer


def parse_sampling(body: bytes) -> Sampling:
    """Return the sampling parameters of a request. Raises BadRequest."""
    document = fields.read_body(body)
    return Sampling(
        temperature=_number(document, "temperature", most=10.0), top_p=_number(document, "top_p", most=1.0) or 1.0
    )


def _number(document: fields.JsonObject, key: str, *, most: float) -> float:
    value = document.get(key)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadRequest(f"{key} must be a number from 0 to {most:g}.", key)
    return float(value)
