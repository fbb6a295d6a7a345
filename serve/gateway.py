"""The gateway: what agents in sandboxes talk to, and what workers open and close sessions on. One plain class, aiohttp
inside.

Invariants:
- A session's token is unguessable and opens that session's routes only; admin routes need the admin token, compared in
  constant time.
- A failure that reaches an agent is marked in its session before the answer is written.
- An unknown or closed session is refused at once with 400, also after a restart: sessions live in memory in this form.
- A session whose wall budget ended `expire_grace_s` ago is closed: its worker is dead.
- All engine traffic goes through `EnginePool`; nothing here renders, samples or counts tokens.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import aiohttp
import orjson
from aiohttp import web
from opentelemetry import trace
from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.sglang import SGLangConfig, SGLangEngine
from headrace.serve import codec
from headrace.serve.dialects import chat
from headrace.serve.engines import EngineDeadlines, EnginePool
from headrace.serve.errors import (
    AdminDenied,
    BadRequest,
    BodyTooLarge,
    GatewayBroken,
    InfraError,
    SessionExists,
    SessionUnknown,
    WireError,
)
from headrace.serve.render import load_renderer
from headrace.serve.session import Session, SessionId, SessionReport
from headrace.serve.turns import LiveSession, Turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from opentelemetry.trace import Tracer

    from headrace.policies.engine import Engine, EngineId
    from headrace.serve.render import Renderer
    from headrace.serve.routing import EngineRoute, RoutingTable

logger = logging.getLogger(__name__)


class GatewayConfig(BaseModel):
    """What a gateway needs to know at start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokenizer_dir: Path | None = None
    """Directory with tokenizer.json and the chat template of the policy. None when a renderer is passed in."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Ids the model has (`vocab_size` of its config.json, which padding may make larger than the tokenizer's); the
    tokenizer's when None. An id outside is never sent."""
    advertise_url: str | None = None
    """Base of the URLs handed out, for agents that do not run on this host; the bound address when None."""
    gate_wait_s: float = Field(default=60.0, gt=0)
    """How long a turn waits while every engine's gate is closed before the agent gets an infra error."""
    turn_timeout_s: float = Field(default=300.0, gt=0)
    """How long one engine call may take before it is aborted and tried elsewhere."""
    held_after_s: float = Field(default=10.0, gt=0)
    """A turn that is broken off after so long without one sampled token marks its session: infra, not a spent
    budget."""
    abort_grace_s: float = Field(default=2.0, gt=0)
    """How long an aborted engine call may take to hand over its partial tokens."""
    expire_grace_s: float = Field(default=60.0, gt=0)
    """How long after the end of its wall budget a session may still be finished; then it is forgotten."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest request body; larger ones are refused with 413."""
    max_imbalance: int = Field(default=8, ge=0)
    """A session leaves its usual engine when that one has this many more requests in flight than the least busy one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStats:
    """A snapshot for progress lines and metrics. `tokens_by_version` counts recorded tokens since the start, keys are
    `epoch.step`."""

    sessions: int
    turns_in_flight: dict[str, int]
    sampled_tokens: int
    tokens_by_version: dict[str, int]


class Gateway:
    """Serves agents over HTTP. All public methods are async: it runs in an actor or inline.

    `renderer`, `connect` and `tracer` replace what the config would make: the tokenizer's renderer, SGLang clients,
    the global tracer.
    """

    def __init__(
        self,
        config: GatewayConfig,
        admin_token: str,
        *,
        renderer: Renderer | None = None,
        connect: Callable[[EngineRoute], Engine] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        if len(admin_token) < 16:
            raise ValueError("admin_token must have at least 16 characters")
        self._config = config
        self._admin_token = admin_token.encode()
        self._renderer = renderer
        self._connect = connect
        self._tracer = tracer or trace.get_tracer("headrace.serve")
        self._by_token: dict[str, LiveSession] = {}
        self._by_id: dict[SessionId, LiveSession] = {}
        self._started_s = int(time.time())
        self._runner: web.AppRunner | None = None
        self._base_url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the base URL (`http://host:port`). Comes before all other calls; a restart passes the port of before.

        Raises OSError when the port is taken, TokenizerInvalid when the tokenizer cannot be used.
        """
        config = self._config
        renderer = self._renderer or self._load_renderer()
        deadlines = EngineDeadlines(
            gate_wait_s=config.gate_wait_s, call_s=config.turn_timeout_s, abort_grace_s=config.abort_grace_s
        )
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        connect = self._connect or self._connector(renderer)
        self._pool = EnginePool(deadlines, connect, time.monotonic, self._tracer, max_imbalance=config.max_imbalance)
        self._turns = Turns(self._pool, renderer, time.monotonic, self._tracer, held_after_s=config.held_after_s)
        # Cancellation of handlers is how a gone agent stops its engine call.
        runner = web.AppRunner(self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            await self._http.close()
            raise
        self._runner = runner
        bound_port = runner.addresses[0][1]
        self._base_url = f"http://{host}:{bound_port}"
        return self._base_url

    async def stop(self) -> None:
        """Refuse new turns, end running ones, close engine clients. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        await self._close_all(list(self._by_id.values()))
        await runner.cleanup()
        await self._pool.aclose()
        await self._http.close()

    async def __aenter__(self) -> Self:
        if self._runner is None:
            await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def set_engines(self, table: RoutingTable) -> bool:
        """Replace the routing table; False when the one here is as new."""
        return await self._pool.replace_table(table)

    async def close_gate(self, engine_id: EngineId, lease_s: float) -> None:
        """No new turn goes to the engine until `open_gate`, or until the lease ends by itself."""
        self._pool.close_gate(engine_id, lease_s)

    async def open_gate(self, engine_id: EngineId) -> None:
        await self._pool.open_gate(engine_id)

    async def in_flight(self) -> GatewayStats:
        await self._expire()
        return GatewayStats(
            sessions=len(self._by_id),
            turns_in_flight={str(engine): number for engine, number in self._pool.router.in_flight.items()},
            sampled_tokens=self._turns.sampled_tokens,
            tokens_by_version=dict(self._turns.tokens_by_version),
        )

    def _load_renderer(self) -> Renderer:
        if self._config.tokenizer_dir is None:
            raise ValueError("gateway.tokenizer_dir is not set: name the directory of the policy's tokenizer")
        return load_renderer(self._config.tokenizer_dir)

    def _connector(self, renderer: Renderer) -> Callable[[EngineRoute], Engine]:
        config = SGLangConfig(
            vocab_size=self._config.vocab_size or renderer.vocab_size,
            # Ours ends first, so that an aborted call can hand over what it has.
            generate_timeout_s=self._config.turn_timeout_s + 2 * self._config.abort_grace_s,
            abort_timeout_s=self._config.abort_grace_s,
        )
        return lambda route: SGLangEngine(route.engine_id, route.url, self._http, config)

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._boundary])
        app.router.add_get("/", _alive)
        app.router.add_get("/healthz", _alive)
        app.router.add_get("/s/{token}/v1/models", self._models)
        app.router.add_post("/s/{token}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions", self._admin(self._open_sessions))
        app.router.add_post("/sessions/finish", self._admin(self._finish_sessions))
        app.router.add_delete("/sessions/{session_id:.+}", self._admin(self._delete_session))
        return app

    @web.middleware
    async def _boundary(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Where failures are classified: every one becomes OpenAI's error shape, and infra ones mark the session."""
        try:
            return await handler(request)
        except WireError as error:
            failure = error
        except web.HTTPRequestEntityTooLarge:
            failure = BodyTooLarge(f"The body is larger than {self._config.max_body_bytes} bytes.")
        except web.HTTPException as error:
            reason = {"message": error.reason, "type": "invalid_request_error", "param": None, "code": None}
            return _json({"error": reason}, error.status)
        except Exception:
            logger.exception("request %s failed", request.path.split("/")[-1])
            failure = GatewayBroken("The gateway failed; see its log.")
        live = self._by_token.get(request.match_info.get("token", ""))
        if isinstance(failure, InfraError) and live is not None:
            live.core.fail(f"{failure.code}: {failure}")
        return _json(chat.error(failure), failure.status)

    async def _chat(self, request: web.Request) -> web.Response:
        live = self._live(request)
        asked = chat.parse(await self._body(request))
        turn = await self._turns.run(live, asked.turn)
        return _json(chat.answer(asked, turn, answer_id=uuid.uuid4().hex, created_s=int(time.time())))

    async def _models(self, request: web.Request) -> web.Response:
        self._live(request)
        return _json(chat.models(self._started_s))

    def _live(self, request: web.Request) -> LiveSession:
        live = self._by_token.get(request.match_info["token"])
        if live is None:
            raise SessionUnknown("This session is unknown or closed. Sessions do not survive a restart of the gateway.")
        return live

    async def _body(self, request: web.Request) -> bytes:
        # Refused by its declared length before a byte is read; a body without one is cut off by aiohttp while reading.
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise BodyTooLarge(f"The body is larger than {self._config.max_body_bytes} bytes.")
        try:
            return await request.read()
        except web.RequestPayloadError as error:
            # The sender's own broken encoding: as a failure of ours it would turn a rollout into infra.
            raise BadRequest(f"The body cannot be decoded: {' '.join(str(error).split())}") from None

    def _admin(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def checked(request: web.Request) -> web.Response:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._admin_token):
                raise AdminDenied("This route needs Authorization: Bearer <admin token>.")
            return await handler(request)

        return checked

    async def _expire(self) -> None:
        """Close what nobody finished: its worker died."""
        now = time.monotonic()
        expired = [live for live in self._by_id.values() if live.core.wall_left_s(now) < -self._config.expire_grace_s]
        if expired:
            logger.warning("%d sessions were never finished and are closed", len(expired))
            await self._close_all(expired)

    async def _open_sessions(self, request: web.Request) -> web.Response:
        specs = [form.to_spec() for form in codec.read_form(codec.OpenForm, await self._body(request)).sessions]
        ids = [spec.session_id for spec in specs]
        if len(set(ids)) < len(ids):
            raise BadRequest("session_id must differ within a request.", "sessions")
        taken = [session_id for session_id in ids if session_id in self._by_id]
        if taken:
            raise SessionExists(f"session {taken[0]} is open already; nothing was opened.", "sessions")
        opened_at = time.monotonic()
        opened = [LiveSession(core=Session(spec, opened_at), token=secrets.token_urlsafe(24)) for spec in specs]
        for live in opened:
            self._by_id[live.core.spec.session_id] = self._by_token[live.token] = live
        base = self._config.advertise_url or self._base_url
        urls = [{"session_id": live.core.spec.session_id, "base_url": f"{base}/s/{live.token}"} for live in opened]
        return _json({"sessions": urls})

    async def _finish_sessions(self, request: web.Request) -> web.Response:
        ids = codec.read_form(codec.FinishForm, await self._body(request)).session_ids
        known = {session_id: live for session_id in ids if (live := self._by_id.get(SessionId(session_id)))}
        closed = dict(zip(known, await self._close_all(list(known.values())), strict=True))
        unknown: dict[str, object] = {"error": SessionUnknown.code}
        reports = [
            codec.write_report(closed[name]) if name in closed else unknown | {"session_id": name} for name in ids
        ]
        return _json({"reports": reports})

    async def _delete_session(self, request: web.Request) -> web.Response:
        live = self._by_id.get(SessionId(request.match_info["session_id"]))
        if live is None:
            raise SessionUnknown("This session is unknown or closed.")
        await self._close_all([live])
        return web.Response(status=204)

    async def _close_all(self, sessions: list[LiveSession]) -> list[SessionReport]:
        for live in sessions:
            self._by_id.pop(live.core.spec.session_id, None)
            self._by_token.pop(live.token, None)
        async with asyncio.TaskGroup() as group:
            closing = [group.create_task(self._turns.close(live)) for live in sessions]
        return [task.result() for task in closing]


def _json(document: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


async def _alive(_request: web.Request) -> web.Response:
    return _json({"status": "ok"})
