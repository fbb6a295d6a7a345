"""The gateway: what agents in sandboxes talk to, and what workers open and close sessions on. One plain class, aiohttp
inside.

Invariants:
- A session's token is unguessable and opens that session's routes only; admin routes need the admin token, compared in
  constant time.
- A failure that reaches an agent is marked in its session before the answer is written.
- An unknown or closed session is refused at once with 400. With a log folder sessions survive a restart.
- A session whose wall budget ended `expire_grace_s` ago is closed: its worker is dead.
- All engine traffic goes through `EnginePool`; nothing here renders, samples or counts tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp import web
from opentelemetry import trace

from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.serve.capture.session_log import SessionLog
from headrace.serve.gateway.admin_routes import AdminRoutes, refusal_of
from headrace.serve.gateway.agent_routes import AgentRoutes
from headrace.serve.gateway.engines import EngineDeadlines, EnginePool
from headrace.serve.gateway.sessions import SessionTable
from headrace.serve.gateway.turns import Turns
from headrace.serve.parsing.parser_choice import choose_parser
from headrace.serve.rendering.template_renderer import load_renderer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from opentelemetry.trace import Tracer

    from headrace.policies.engine import Engine, EngineId
    from headrace.serve.gateway.config import GatewayConfig
    from headrace.serve.gateway.routing import EngineRoute, RoutingTable
    from headrace.serve.parsing.base import OutputParser
    from headrace.serve.rendering.render import Renderer

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 7 * 86400.0
"""Of a client's generate call: beyond every deadline of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStats:
    """A snapshot for progress lines and metrics. `tokens_by_version` counts recorded tokens since the start, keys are
    `epoch.step`; `turns` counts recorded turns since the start; `lost_calls` counts call markup that gave no call;
    `parser_fails`: of many such turns in a row none gave one, so the parser does not fit the model; `silent` counts the
    calls in a row that an engine did not answer in time; `closed` are engines whose gate is closed; `table_version` is
    that of the routing table, -1 before the first one."""

    sessions: int
    turns_in_flight: dict[str, int]
    sampled_tokens: int
    tokens_by_version: dict[str, int]
    turns: int = 0
    lost_calls: int = 0
    parser_fails: bool = False
    silent: dict[str, int] = field(default_factory=dict)
    closed: tuple[str, ...] = ()
    table_version: int = -1


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
        self._admin_token = admin_token
        self._renderer = renderer
        self._connect = connect
        self._tracer = tracer or trace.get_tracer("headrace.serve")
        self._stack: AsyncExitStack | None = None
        self._base_url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the base URL (`http://host:port`). Comes before all other calls; a restart passes the port of before.

        Raises OSError when the port is taken, TokenizerInvalid when the tokenizer cannot be used, ParserUnknown.
        """
        renderer = self._renderer or self._load_renderer()
        parser = choose_parser(self._config.parser, renderer.template)
        try:
            async with AsyncExitStack() as stack:
                connector = aiohttp.TCPConnector(limit=0)
                self._http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
                self._make_parts(renderer, parser, await stack.enter_async_context(asyncio.TaskGroup()), stack)
                self._base_url = await self._listen(host, port, stack)
                self._stack = stack.pop_all()
        except ExceptionGroup as group:
            # The task group's, which has no tasks yet: it wraps the one error of this block.
            raise group.exceptions[0] from None
        return self._base_url

    def _make_parts(
        self, renderer: Renderer, parser: OutputParser, tasks: asyncio.TaskGroup, stack: AsyncExitStack
    ) -> None:
        config, self._decode = self._config, renderer.decode
        deadlines = EngineDeadlines(
            gate_wait_s=config.gate_wait_s, call_s=config.turn_timeout_s, abort_grace_s=config.abort_grace_s
        )
        connect = self._connect or self._connector(renderer)
        self._pool = EnginePool(deadlines, connect, time.monotonic, self._tracer, max_imbalance=config.max_imbalance)
        stack.push_async_callback(self._pool.aclose)
        self._turns = Turns(
            self._pool,
            renderer,
            parser,
            time.monotonic,
            self._tracer,
            held_after_s=config.held_after_s,
            incarnation=secrets.token_hex(4),
        )
        stack.callback(self._turns.aclose)
        self._sessions = SessionTable(
            self._turns,
            SessionLog(config.session_log_dir) if config.session_log_dir else None,
            time.monotonic,
            tasks,
            expire_grace_s=config.expire_grace_s,
            finished_grace_s=config.finished_grace_s,
        )

    async def _listen(self, host: str, port: int, stack: AsyncExitStack) -> str:
        stack.push_async_callback(self._sessions.end_turns)
        # Cancellation of handlers is how a gone agent stops its engine call.
        runner = web.AppRunner(self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, port, backlog=4096).start()
        if self._config.session_log_dir is None:
            # Told before the listener closes, agents give up at once. Those of sessions that are kept are cut off as by
            # a crash: they ask again, and a successor answers.
            stack.push_async_callback(self._sessions.end_turns)
        return f"http://{host}:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Refuse new turns, end running ones, close engine clients. Idempotent."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def __aenter__(self) -> Self:
        if self._stack is None:
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

    async def open_gate(self, engine_id: EngineId, cache_namespace: str | None = None) -> None:
        """Let turns through again; their requests carry the namespace as long as the engine may have prefixes of older
        weights cached (None: it has none)."""
        await self._pool.open_gate(engine_id, cache_namespace)

    async def in_flight(self) -> GatewayStats:
        """What is going on; sessions that nobody finished in time are forgotten on the way."""
        await self._sessions.expire()
        return GatewayStats(
            sessions=len(self._sessions),
            turns_in_flight={str(engine): number for engine, number in self._pool.router.in_flight.items()},
            sampled_tokens=self._turns.sampled_tokens,
            tokens_by_version=dict(self._turns.tokens_by_version),
            turns=self._turns.recorded,
            lost_calls=self._turns.lost_calls,
            parser_fails=self._turns.parser_alarm.raised,
            silent={str(engine): number for engine, number in self._pool.silent.items()},
            closed=self._pool.router.closed(time.monotonic()),
            table_version=self._pool.router.table.version,
        )

    def _load_renderer(self) -> Renderer:
        if self._config.tokenizer_dir is None:
            raise ValueError("gateway.tokenizer_dir is not set: name the directory of the policy's tokenizer")
        return load_renderer(self._config.tokenizer_dir)

    def _connector(self, renderer: Renderer) -> Callable[[EngineRoute], Engine]:
        config = SGLangConfig(
            vocab_size=self._config.vocab_size or renderer.vocab_size,
            # The pool ends calls: it knows how long a push has held them up, and aborts them first.
            generate_timeout_s=CLIENT_TIMEOUT_S,
            abort_timeout_s=self._config.abort_grace_s,
            foreign_version=self._config.foreign_version,
            in_place=self._config.in_place_pushes,
        )
        return lambda route: SGLangEngine(route.engine_id, route.url, self._http, config)

    def _application(self) -> web.Application:
        config = self._config
        app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_boundary])
        AgentRoutes(
            self._sessions,
            self._turns,
            max_body_bytes=config.max_body_bytes,
            ping_s=config.ping_s,
            model_policy=config.model_policy,
        ).add_to(app)
        AdminRoutes(
            self._sessions,
            self._admin_token,
            lambda: config.advertise_url or self._base_url,
            decode=self._decode,
            max_body_bytes=config.max_body_bytes,
            max_context_tokens=config.max_context_tokens,
        ).add_to(app)
        return app


@web.middleware
async def _boundary(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What no route knows is told in JSON too."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.Response(body=refusal_of(error.reason), status=error.status, content_type="application/json")
