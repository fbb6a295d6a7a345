"""Dialects against the vendors' SDKs over HTTP: their requests are parsed, and they accept our answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import orjson
import pytest
from aiohttp import web

from headrace.serve.gateway.conversation import (
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    TurnAnswer,
    TurnEnd,
)
from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import Dialect, WireRequest
from headrace.serve.gateway.dialects.responses import Responses
from headrace.serve.gateway.errors import (
    SERVER_FAILED,
    BadRequest,
    ContextExceeded,
    NoEngineOpen,
    SessionUnknown,
    WireError,
)

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
BLOCKS = (Reasoning("hm", "t1"), Text("I look.\u2028\n"), ToolCall("call_1", "bash", '{"command":"ls é"}'))
TURN = TurnAnswer(turn_id="t1", blocks=BLOCKS, end=TurnEnd.CALLS, prompt_tokens=70, completion_tokens=9)
RESULT = Message(Role.TOOL, (ToolResult("call_1", "out"),))
ROUTES: dict[str, Dialect] = {
    "/v1/messages": AnthropicMessages(),
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
}


@dataclass(slots=True)
class Provider:
    """Server of one turn. With `failure`, it sends the error instead, in the stream if that began with pings."""

    url: str = ""
    turn: TurnAnswer = TURN
    failure: WireError | None = None
    begun: bool = True
    pings: bool = True
    asked: WireRequest | None = None

    async def handle(self, request: web.Request) -> web.Response:
        dialect = ROUTES[request.path]
        try:
            self.asked = asked = dialect.parse(await request.read(), request.headers)
        except BadRequest as error:
            return web.json_response(dialect.error(error), status=dialect.status(error))
        if asked.stream and (self.begun or self.failure is None):
            written = 2 * dialect.ping if self.pings else b""
            if self.failure is None:
                written += dialect.stream(asked, self.turn, created_s=7)
            else:
                written += dialect.stream_error(asked, self.failure)
            return web.Response(body=written, content_type="text/event-stream")
        if self.failure is not None:
            return web.json_response(dialect.error(self.failure), status=dialect.status(self.failure))
        return web.Response(
            body=orjson.dumps(dialect.answer(asked, self.turn, created_s=7)), content_type="application/json"
        )

    async def models(self, request: web.Request) -> web.Response:
        dialect = ROUTES["/v1/messages" if "anthropic-version" in request.headers else "/v1/responses"]
        return web.json_response(dialect.models(7))

    @property
    def turns(self) -> tuple[Message, ...]:
        assert self.asked is not None
        return self.asked.turn.messages


@pytest.fixture(name="provider")
async def provider_fixture() -> AsyncIterator[Provider]:
    provider = Provider()
    app = web.Application()
    for path in ROUTES:
        app.router.add_post(path, provider.handle)
    app.router.add_get("/v1/models", provider.models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield provider
    finally:
        await runner.cleanup()


@asynccontextmanager
async def claude(provider: Provider) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=provider.url, auth_token="k", max_retries=0) as client:
        yield client


@asynccontextmanager
async def gpt(provider: Provider) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{provider.url}/v1", api_key="k", max_retries=0) as client:
        yield client


ANTHROPIC: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 99,
    "tools": [{"name": "bash", "description": "Runs", "input_schema": PARAMETERS}],
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropics_sdk_parses_and_echoes_a_turn(provider: Provider, streamed: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    async with claude(provider) as client:
        if streamed:
            async with client.messages.stream(messages=asked, **ANTHROPIC) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(messages=asked, **ANTHROPIC)
        assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 70, 9)
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "out"}
        echo = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        await client.messages.create(messages=echo, **ANTHROPIC)
    assert provider.turns[1:] == (Message(Role.ASSISTANT, BLOCKS), RESULT)


CHAT: dict[str, Any] = {
    "model": "gpt-x",
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}],
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_openais_sdk_parses_and_echoes_a_completion(provider: Provider, streamed: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    async with gpt(provider) as client:
        if streamed:
            options: Any = {"include_usage": True}
            async with client.chat.completions.stream(messages=asked, stream_options=options, **CHAT) as stream:
                completion: Any = await stream.get_final_completion()
        else:
            completion = await client.chat.completions.create(messages=asked, **CHAT)
        (choice,) = completion.choices
        assert (choice.finish_reason, completion.usage.total_tokens) == ("tool_calls", 79)
        echo: Any = choice.message.to_dict()
        result: Any = {"role": "tool", "tool_call_id": "call_1", "content": "out"}
        await client.chat.completions.create(messages=[*asked, echo, result], **CHAT)
    (said, *rest) = provider.turns[1:]
    # The wire has no signature.
    assert said == Message(Role.ASSISTANT, (Reasoning("hm"), *BLOCKS[1:]))
    assert rest == [RESULT]


RESPONSES: dict[str, Any] = {
    "model": "gpt-x",
    "tools": [{"type": "function", "name": "bash", "parameters": PARAMETERS}],
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_openais_sdk_parses_and_echoes_a_response(provider: Provider, streamed: bool) -> None:
    # This helper, unlike the plain stream below, takes no event before the first of its own, OpenAI's pings neither.
    provider.pings = False
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    async with gpt(provider) as client:
        if streamed:
            async with client.responses.stream(input=asked, **RESPONSES) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await client.responses.create(input=asked, **RESPONSES)
        assert (response.status, response.usage.total_tokens, response.output_text) == ("completed", 79, BLOCKS[1].text)
        result = {"type": "function_call_output", "call_id": "call_1", "output": "out"}
        echo: Any = [*asked, *(part.to_dict() for part in response.output), result]
        await client.responses.create(input=echo, **RESPONSES)
    assert provider.turns[1:] == (Message(Role.ASSISTANT, BLOCKS), RESULT)


async def test_a_truncated_turn_is_reported_by_every_dialect(provider: Provider) -> None:
    provider.turn = TurnAnswer(turn_id="t2", blocks=(Text("half"),), end=TurnEnd.LENGTH)
    asked: Any = [{"role": "user", "content": "hello"}]
    async with claude(provider) as client, client.messages.stream(messages=asked, **ANTHROPIC) as stream:
        message = await stream.get_final_message()
    async with gpt(provider) as other:
        completion = await other.chat.completions.create(messages=asked, **CHAT)
        events = await other.responses.create(input=asked, stream=True, **RESPONSES)
        (*_, last) = [event async for event in events]
    assert message.stop_reason == "max_tokens"
    assert completion.choices[0].finish_reason == "length"
    assert last.type == "response.incomplete"


@pytest.mark.parametrize(
    ("failure", "told", "ours", "theirs"),
    [
        (SessionUnknown("gone"), "gone", anthropic.BadRequestError, openai.BadRequestError),
        (NoEngineOpen("shut"), SERVER_FAILED, anthropic.InternalServerError, openai.InternalServerError),
    ],
)
async def test_sdks_raise_the_matching_error_types(
    provider: Provider, failure: WireError, told: str, ours: type[Exception], theirs: type[Exception]
) -> None:
    provider.failure, provider.begun = failure, False
    asked: Any = [{"role": "user", "content": "hello"}]
    async with claude(provider) as client, gpt(provider) as other:
        for stream in (False, True):
            with pytest.raises(ours, match=told):
                await client.messages.create(messages=asked, stream=stream, **ANTHROPIC)
            with pytest.raises(theirs, match=told):
                await other.chat.completions.create(messages=asked, stream=stream, **CHAT)
            with pytest.raises(theirs, match=told):
                await other.responses.create(input=asked, stream=stream, **RESPONSES)


async def test_sdks_raise_errors_received_during_a_stream(provider: Provider) -> None:
    provider.failure = NoEngineOpen("shut")
    asked: Any = [{"role": "user", "content": "hello"}]
    async with claude(provider) as client, gpt(provider) as other:
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            async with client.messages.stream(messages=asked, **ANTHROPIC) as stream:
                await stream.until_done()
        chunks = await other.chat.completions.create(messages=asked, stream=True, **CHAT)
        with pytest.raises(openai.APIError, match=SERVER_FAILED):
            _ = [chunk async for chunk in chunks]
        provider.failure = ContextExceeded("long", tokens=9, limit=5)
        events = await other.responses.create(input=asked, stream=True, **RESPONSES)
        (*_, last) = [event async for event in events]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "context_length_exceeded"


async def test_sdks_parse_the_model_list(provider: Provider) -> None:
    async with claude(provider) as client, gpt(provider) as other:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert [model.id async for model in other.models.list()] == ["policy"]
