"""Test rig of a gateway over real HTTP, with plain clients of the three APIs and scripted engines.

The clients are written from the vendors' pages: they keep what they were served and send it back.
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from opentelemetry.trace import Tracer

from headrace.policies.engine import EngineId
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from headrace.serve.tracing.foreign_spans import SpanIntake
from support.loopback import on_loopback
from support.scripted_engine import Ask, Fault, ScriptedEngine
from support.wires import fold_anthropic, fold_chat, fold_responses

ADMIN = "an-admin-token-of-enough-letters"
R1 = SessionId("rollout-1")
SYSTEM = "You repair things."
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close is a reset."""
GUARD_S = 60.0
"""How long a test waits for what must come at once, before it says that it hangs."""


@dataclass(kw_only=True)
class Engine(ScriptedEngine):
    """Also tells about itself and knows stop strings, as SGLang does, and can be held: while `may_answer` is clear it
    answers only what is aborted, while `may_abort` is clear it aborts nothing. `latency_s` is the time a turn takes."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    may_abort: asyncio.Event = field(default_factory=asyncio.Event)
    abort_asked: asyncio.Event = field(default_factory=asyncio.Event)
    weight_version: str = "1.4"
    context_length: int = 32768
    latency_s: float = 0.0
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()
        self.may_abort.set()

    async def abort_request(self, request: web.Request) -> web.Response:
        self.abort_asked.set()
        await self.may_abort.wait()
        return await super().abort_request(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        rid = (await request.json())["rid"]
        self.asked.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            await self._hold(rid)
            if self.aborted[rid].is_set():
                return self._aborted(await request.json())
            return await super().generate(request)
        finally:
            self.running -= 1

    async def _hold(self, rid: str) -> None:
        if self.may_answer.is_set():
            return
        waiting = {asyncio.ensure_future(event.wait()) for event in (self.may_answer, self.aborted[rid])}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiting:
                waiter.cancel()

    def _aborted(self, body: dict[str, Any]) -> web.Response:
        self.requests.append(body)
        prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        return self._reply(body, prompt, "", [self.stop_id - 1], {"type": "abort", "message": "Aborted"})

    def _reply(
        self, body: dict[str, Any], prompt: str, text: str, ids: list[int], finish: Mapping[str, Any]
    ) -> web.Response:
        ends = [text.find(stop) + len(stop) for stop in body["sampling_params"]["stop"] if stop in text]
        if ends:
            # What completes the string is the last that is sampled.
            text = text[: min(ends)]
            ids, finish = self.encode(text), {"type": "stop", "matched": "its own"}
        return super()._reply(body, prompt, text, ids, finish)

    async def server_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.21", "context_length": self.context_length})

    async def model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def loads(self, _request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def ready(self, _request: web.Request) -> web.Response:
        return web.Response()

    def outputs(self) -> list[list[int]]:
        """The sampled outputs, in order."""
        return [list(one.output_ids) for one in self.sampled]


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    """Serve the engine on a loopback port during the block."""
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort_request)
    for path, handler in (
        ("/server_info", engine.server_info),
        ("/model_info", engine.model_info),
        ("/v1/loads", engine.loads),
        ("/ready", engine.ready),
    ):
        app.router.add_get(path, handler)
    async with on_loopback(app, backlog=1024) as engine.url:
        yield engine


class Lines:
    """A script: each request gets the next line; past the end the last one for ever."""

    def __init__(self, *lines: str | Fault) -> None:
        self._left = list(lines)

    def __call__(self, _ask: Ask) -> str | Fault:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


def call_text(name: str, **arguments: Any) -> str:
    """Return a call as Qwen3 samples it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# Wires.


@dataclass(frozen=True)
class Reply:
    """What a client has of an answer. `kept` is what it sends back; `end` is the wire's own word."""

    status: int
    raw: bytes
    kept: Any = None
    text: str = ""
    calls: tuple[tuple[str, str, Any], ...] = ()
    end: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    stop_string: str | None = None

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.raw)["error"]
        return error


class Wire:
    """Client protocol of one API. A history is a list of the API's own items."""

    name: str
    path: str
    terminator: bytes
    limit_field: str
    ping: bytes

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        raise NotImplementedError

    def echo(self, kept: Any) -> list[Any]:
        raise NotImplementedError

    def body(self, history: Sequence[Any], tools: Sequence[str], system: str) -> dict[str, Any]:
        raise NotImplementedError

    def fold(self, raw: bytes) -> dict[str, Any]:
        """Convert a stream to the document of an answer that is not streamed."""
        raise NotImplementedError

    def read(self, document: dict[str, Any], raw: bytes) -> Reply:
        raise NotImplementedError


PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}


class _Anthropic(Wire):
    name, path, terminator = "anthropic", "/v1/messages", b"event: message_stop"
    limit_field, ping = "max_tokens", b"event: ping"

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in pairs]
        return [{"role": "user", "content": blocks}]

    def echo(self, kept: Any) -> list[Any]:
        return [{"role": "assistant", "content": kept}]

    def body(self, history: Sequence[Any], tools: Sequence[str], system: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "claude-opus-4-8", "max_tokens": 4096, "messages": list(history)}
        if system:
            body["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        if tools:
            body["tools"] = [{"name": tool, "description": "d", "input_schema": PARAMETERS} for tool in tools]
        return body

    def fold(self, raw: bytes) -> dict[str, Any]:
        return fold_anthropic(raw)

    def read(self, document: dict[str, Any], raw: bytes) -> Reply:
        blocks = document["content"]
        return Reply(
            status=200,
            raw=raw,
            kept=blocks,
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            calls=tuple((b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"),
            end=document["stop_reason"],
            input_tokens=document["usage"]["input_tokens"],
            output_tokens=document["usage"]["output_tokens"],
            stop_string=document["stop_sequence"],
        )


class _Chat(Wire):
    name, path, terminator = "chat", "/v1/chat/completions", b"data: [DONE]"
    limit_field, ping = "max_completion_tokens", b": ping"

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in pairs]

    def echo(self, kept: Any) -> list[Any]:
        return [kept]

    def body(self, history: Sequence[Any], tools: Sequence[str], system: str) -> dict[str, Any]:
        head = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {"model": "gpt-x", "messages": [*head, *history]}
        body["stream_options"] = {"include_usage": True}
        if tools:
            functions = [{"name": tool, "description": "d", "parameters": PARAMETERS} for tool in tools]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        return body

    def fold(self, raw: bytes) -> dict[str, Any]:
        folded = fold_chat(raw)
        choice = {"message": folded["message"], "finish_reason": folded["finish_reason"]}
        return {"choices": [choice], "usage": folded["usage"]}

    def read(self, document: dict[str, Any], raw: bytes) -> Reply:
        choice = document["choices"][0]
        message = choice["message"]
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        return Reply(
            status=200,
            raw=raw,
            kept=message,
            text=message["content"] or "",
            calls=tuple((call_id, one["name"], json.loads(one["arguments"])) for call_id, one in functions),
            end=choice["finish_reason"],
            input_tokens=document["usage"]["prompt_tokens"],
            output_tokens=document["usage"]["completion_tokens"],
        )


class _Responses(Wire):
    name, path, terminator = "responses", "/v1/responses", b"event: response.completed"
    limit_field, ping = "max_output_tokens", b"event: keepalive"

    def user(self, text: str) -> list[Any]:
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in pairs]

    def echo(self, kept: Any) -> list[Any]:
        return list(kept)

    def body(self, history: Sequence[Any], tools: Sequence[str], system: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "gpt-x-codex", "input": list(history), "store": False}
        if system:
            body["instructions"] = system
        if tools:
            body["tools"] = [
                {"type": "function", "name": tool, "description": "d", "parameters": PARAMETERS} for tool in tools
            ]
        return body

    def fold(self, raw: bytes) -> dict[str, Any]:
        # A keep-alive is no event of the answer: it stands outside of its numbers.
        events = [chunk for chunk in raw.split(b"\n\n") if not chunk.startswith(b"event: keepalive")]
        return fold_responses(b"\n\n".join(events))

    def read(self, document: dict[str, Any], raw: bytes) -> Reply:
        items = document["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        calls = [item for item in items if item["type"] == "function_call"]
        return Reply(
            status=200,
            raw=raw,
            kept=items,
            text="".join(texts),
            calls=tuple((item["call_id"], item["name"], json.loads(item["arguments"])) for item in calls),
            end=document["status"],
            input_tokens=document["usage"]["input_tokens"],
            output_tokens=document["usage"]["output_tokens"],
        )


ANTHROPIC, CHAT, RESPONSES = _Anthropic(), _Chat(), _Responses()
WIRES: tuple[Wire, ...] = (ANTHROPIC, CHAT, RESPONSES)


@dataclass
class Client:
    """Agent's client of one API: every request contains the whole history, to which every answer is appended."""

    http: aiohttp.ClientSession
    base_url: str
    wire: Wire
    stream: bool = False
    tools: tuple[str, ...] = ()
    system: str = SYSTEM
    headers: dict[str, str] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)

    def body(self, **fields: Any) -> dict[str, Any]:
        return self.wire.body(self.history, self.tools, self.system) | {"stream": self.stream} | fields

    async def send(self, body: dict[str, Any] | bytes) -> Reply:
        """One request as it is; nothing is kept."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        # A large one as a file, which the client sends piece by piece.
        sent = io.BytesIO(data) if len(data) > 1 << 20 else data
        async with self.http.post(self.base_url + self.wire.path, data=sent, headers=headers) as response:
            raw = await response.read()
            if response.status != 200:
                return Reply(response.status, raw)
            streamed = response.content_type == "text/event-stream"
        return self.wire.read(self.wire.fold(raw) if streamed else json.loads(raw), raw)

    async def ask(self, *items: Any, **fields: Any) -> Reply:
        """A question and its answer, both kept; `items` are the wire's own."""
        self.history += items
        reply = await self.send(self.body(**fields))
        if reply.status == 200:
            self.history += self.wire.echo(reply.kept)
        return reply

    async def say(self, text: str, /, **fields: Any) -> Reply:
        return await self.ask(*self.wire.user(text), **fields)

    async def give(self, *pairs: tuple[str, str], **fields: Any) -> Reply:
        """Append results of tool calls."""
        return await self.ask(*self.wire.results(*pairs), **fields)


@dataclass
class World:
    gateway: Gateway
    url: str
    admin: GatewayClient
    http: aiohttp.ClientSession
    engines: list[Engine]

    async def open(self, session_id: str = R1, **spec: Any) -> str:
        """Open a session; return its base URL."""
        opened = await self.admin.open(SessionSpec(session_id=SessionId(session_id), **spec))
        return opened.base_url

    async def finish(self, session_id: str = R1) -> SessionReport:
        report = await self.admin.finish(SessionId(session_id))
        assert isinstance(report, SessionReport), report
        return report

    async def client(self, wire: Wire = CHAT, session_id: str = R1, **settings: Any) -> Client:
        """A client of a new session; `spec` are settings of the session."""
        spec = settings.pop("spec", {})
        return Client(self.http, await self.open(session_id, **spec), wire, **settings)

    async def post(self, path: str, body: Any = None, *, token: str = ADMIN) -> tuple[int, Any]:
        """An admin request as a stranger's program would send it."""
        headers = {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()


# Its probes of the template take a quarter of a second.
renderer_of = lru_cache(load_renderer)


@asynccontextmanager
async def world(
    model_dir: Path,
    *scripts: Callable[[Ask], str | Fault],
    end: str = "<|im_end|>",
    renderer: Renderer | None = None,
    tracer: Tracer | None = None,
    intake: SpanIntake | None = None,
    engine_type: type[Engine] = Engine,
    in_processes: bool = False,
    **config: Any,
) -> AsyncIterator[World]:
    """Start a gateway and an engine for each script (by default one that samples `ls` for ever). It renders in a
    thread, with a renderer that is loaded already, or `in_processes` of its own, as a run's gateway does."""
    given: dict[str, Any] = {"tokenizer_dir": model_dir, "abort_grace_s": 10.0, **config}
    settings = GatewayConfig(**given)
    engines = [engine_type.of(model_dir, end, script) for script in scripts or (Lines("ls"),)]
    given_renderer = None if in_processes else renderer or renderer_of(model_dir)
    gateway = Gateway(settings, ADMIN, renderer=given_renderer, tracer=tracer, intake=intake)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=GUARD_S)) as http, _all_serving(engines):
        url = await gateway.start()
        try:
            assert await gateway.set_engines(table_of(engines))
            async with GatewayClient(url, ADMIN) as admin:
                yield World(gateway, url, admin, http, engines)
        finally:
            await gateway.stop()


def table_of(engines: Sequence[Engine], version: int = 1) -> RoutingTable:
    routes = (EngineRoute(engine_id=EngineId(f"e{number}"), url=engine.url) for number, engine in enumerate(engines))
    return RoutingTable(version=version, engines=tuple(routes))


@asynccontextmanager
async def _all_serving(engines: Sequence[Engine]) -> AsyncIterator[None]:
    if not engines:
        yield
        return
    async with serving(engines[0]), _all_serving(engines[1:]):
        yield


async def soon(event: asyncio.Event) -> None:
    """Wait for an event that must happen at once."""
    async with asyncio.timeout(GUARD_S):
        await event.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a condition that must hold at once."""
    async with asyncio.timeout(GUARD_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    return host, int(port)


def request_bytes(path: str, body: bytes) -> bytes:
    """A request as it stands on the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def deaf(client: Client, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A request on a connection of its own, of whose answer one byte was read and for little more there is room; it
    ends with a reset."""
    path = client.base_url.partition("//")[2].partition("/")[2]
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, address_of(client.base_url))
        await loop.sock_sendall(sock, request_bytes(f"/{path}{client.wire.path}", json.dumps(body).encode()))
        async with asyncio.timeout(GUARD_S):
            await loop.sock_recv(sock, 1)
        yield sock
