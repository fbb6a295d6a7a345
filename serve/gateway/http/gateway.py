"""The gateway server, with a model API for the agents in sandboxes and a session API for the workers.

Invariants:
- A session's token is unguessable and grants access to that session's routes only; admin routes need the admin token,
  compared in constant time.
- A failure that reaches an agent is recorded in its session before the answer is written.
- An unknown or closed session is refused at once with 400. With a log folder, sessions survive a restart.
- A session whose wall-time budget ended `expire_grace_s` ago is closed, because its worker must be dead.
- Request bodies and connections are bounded: `bodies`, `body_budget` and `connections` say by what.
- All engine traffic goes through `EnginePool`; this module does not render, sample or count tokens.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp
from aiohttp import web
from opentelemetry import trace
from opentelemetry.trace import Tracer

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.policies.engine import Engine, EngineId
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.serve.gateway.capture.coverage import Coverage
from headrace.serve.gateway.capture.session_log import SessionLog
from headrace.serve.gateway.errors import LogBroken
from headrace.serve.gateway.http.admin_routes import AdminRoutes, refusal_of
from headrace.serve.gateway.http.agent_routes import AgentRoutes, name_of
from headrace.serve.gateway.http.bodies import Bodies
from headrace.serve.gateway.http.body_budget import BodyBudget
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.connections import ConnectionSettings, dismiss, listen
from headrace.serve.gateway.http.engines import EnginePool
from headrace.serve.gateway.http.exports import Exporter, ExportFolder
from headrace.serve.gateway.http.limited_log import LimitedLog
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from headrace.serve.gateway.http.sessions import SessionTable
from headrace.serve.gateway.http.turns import Turns
from headrace.serve.gateway.parsing.parser_choice import choose_parser
from headrace.serve.gateway.rendering.processes import RenderProcesses, return_large_blocks
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from headrace.serve.gateway.rendering.work import Renders, RenderThread
from headrace.serve.tracing.foreign_spans import SpanIntake

CLIENT_TIMEOUT_S = 7 * 86400.0
"""Timeout of an engine client's generate call, longer than any of the pool's deadlines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStats:
    """Snapshot of a gateway for progress lines and metrics. `tokens_by_version` counts recorded tokens since the start
    by `epoch.step`; `turns` counts recorded turns since the start; `lost_calls` counts pieces of call markup that could
    not be parsed; `parser_fails` means that many turns in a row had such markup but no call, so that the parser is
    probably the wrong one for the model; `silent` counts the consecutive calls that an engine did not answer in time;
    `closed` lists the engines whose gate is closed; `table_version` is the version of the routing table, -1 before the
    first one; `coverage` is that of the latest finished sessions; `failed_exports` counts finished sessions that could
    not be written to the folder for exports."""

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
    coverage: Coverage = field(default_factory=Coverage)
    failed_exports: int = 0

    @classmethod
    def together(cls, several: Sequence[GatewayStats]) -> GatewayStats:
        """Return the stats of several gateways as those of one: counts are added; `silent`, which counts consecutive
        calls, and `table_version` are the largest."""
        turns: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        silent: dict[str, int] = {}
        for stats in several:
            turns.update(stats.turns_in_flight)
            tokens.update(stats.tokens_by_version)
            silent |= {engine: max(calls, silent.get(engine, 0)) for engine, calls in stats.silent.items()}
        return cls(
            sessions=sum(stats.sessions for stats in several),
            turns_in_flight=dict(turns),
            sampled_tokens=sum(stats.sampled_tokens for stats in several),
            tokens_by_version=dict(tokens),
            turns=sum(stats.turns for stats in several),
            lost_calls=sum(stats.lost_calls for stats in several),
            parser_fails=any(stats.parser_fails for stats in several),
            silent=silent,
            closed=tuple(sorted({engine for stats in several for engine in stats.closed})),
            table_version=max(stats.table_version for stats in several),
            coverage=Coverage.together(stats.coverage for stats in several),
            failed_exports=sum(stats.failed_exports for stats in several),
        )


class Gateway:
    """HTTP server for agents and workers. All public methods are async, so that the gateway can run in an actor or
    inline.

    `renderer`, `connect` and `tracer` replace the defaults: the tokenizer's renderer, SGLang clients and the global
    tracer. A given renderer works in a thread of this process, since no other has it. `intake` takes the spans that
    agents send; without one they are told that nothing does.
    """

    def __init__(
        self,
        config: GatewayConfig,
        admin_token: str,
        *,
        renderer: Renderer | None = None,
        connect: Callable[[EngineRoute], Engine] | None = None,
        tracer: Tracer | None = None,
        intake: SpanIntake | None = None,
    ) -> None:
        if len(admin_token) < 16:
            raise ValueError("admin_token must have at least 16 characters")
        self._config = config
        self._admin_token = admin_token
        self._renderer = renderer
        self._connect = connect
        self._tracer = tracer or trace.get_tracer("headrace.serve")
        self._intake = intake
        self._stack: AsyncExitStack | None = None
        self._base_url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start listening and return the base URL (`http://host:port`). Call this first; after a restart, pass the
        previous port.

        Raises OptionRefused if the folder for exports cannot be used, OSError if the port is taken, TokenizerInvalid if
        the tokenizer cannot be used or its template hides the message bodies that `token_kinds` needs, and
        ParserUnknown.
        """
        return_large_blocks()
        # Texts are tokenized one at a time: a pool of threads would only add the way there and back.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        renderer = self._renderer
        if renderer is None:
            if self._config.tokenizer_dir is None:
                raise ValueError("gateway.tokenizer_dir is not set; set it to the directory of the policy's tokenizer")
            renderer = load_renderer(self._config.tokenizer_dir, token_kinds=self._config.token_kinds)
        try:
            async with AsyncExitStack() as stack:
                connector = aiohttp.TCPConnector(limit=0)
                self._http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
                await self._make_parts(renderer, stack)
                stack.push_async_callback(self._sessions.end_turns)
                app = self._application(renderer)
                # Cancelling the handler of an agent that is gone stops its engine call.
                runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                listener = await listen(runner, host, port, self._connections())
                stack.callback(listener.close)
                if self._config.session_log_dir is None:
                    # Agents that get an answer before the listener closes give up at once. Those of logged sessions are
                    # cut off as by a crash: they retry, and the restarted gateway answers.
                    stack.push_async_callback(self._sessions.end_turns)
                self._base_url = f"http://{host}:{listener.sockets[0].getsockname()[1]}"
                self._stack = stack.pop_all()
        except ExceptionGroup as group:
            # From the task group, which has no tasks yet: it wraps the one error of this block.
            raise group.exceptions[0] from None
        return self._base_url

    async def _make_parts(self, renderer: Renderer, stack: AsyncExitStack) -> None:
        config = self._config
        parser = choose_parser(config.parser, renderer.template)
        self._agents_log = LimitedLog()
        stack.callback(self._agents_log.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        connect = self._connect
        if connect is None:
            client_config = SGLangConfig(
                vocab_size=config.vocab_size or renderer.vocab_size,
                # The pool ends calls: it knows how long a push delayed them, and aborts them first.
                generate_timeout_s=CLIENT_TIMEOUT_S,
                abort_timeout_s=config.abort_grace_s,
                foreign_version=config.foreign_version,
                in_place=config.in_place_pushes,
            )

            def connect(route: EngineRoute) -> Engine:
                key = config.engine_keys.key_of(attached=route.attached)
                return SGLangEngine(route.engine_id, route.url, self._http, client_config, key=key)

        self._pool = EnginePool(config, connect, time.monotonic, self._tracer)
        stack.push_async_callback(self._pool.aclose)
        renders = self._renders(renderer)
        stack.push_async_callback(renders.aclose)
        self._turns = Turns(
            self._pool,
            renderer,
            renders,
            parser,
            time.monotonic,
            self._tracer,
            held_after_s=config.held_after_s,
            incarnation=secrets.token_hex(4),
        )
        self._exporter = Exporter(renderer)
        self._exports = None
        if config.export_dir is not None:
            self._exports = ExportFolder(config.export_dir, config.export_form, self._exporter)
            stack.callback(self._exports.close)
        self._sessions = SessionTable(
            self._turns,
            SessionLog(config.session_log_dir) if config.session_log_dir else None,
            time.monotonic,
            tasks,
            config,
            exports=self._exports,
        )

    def _renders(self, renderer: Renderer) -> Renders:
        config = self._config
        if self._renderer is not None or config.tokenizer_dir is None:
            return RenderThread(renderer)
        return RenderProcesses(
            config.tokenizer_dir,
            token_kinds=config.token_kinds,
            processes=config.render_processes,
            cpu_s=config.render_cpu_s,
        )

    async def stop(self) -> None:
        """Refuse new turns, cancel running ones and close the engine clients. Idempotent."""
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
        """Replace the routing table; return False if the given one is not newer."""
        return await self._pool.replace_table(table)

    async def close_gate(self, engine_id: EngineId, lease_s: float) -> None:
        """Send no new turn to the engine until `open_gate`, or until the lease expires."""
        self._pool.close_gate(engine_id, lease_s)

    async def open_gate(self, engine_id: EngineId, cache_namespace: str | None = None) -> None:
        """Let turns through again. Their requests carry the namespace, which is None if the engine has no cached
        prefixes from older weights."""
        await self._pool.open_gate(engine_id, cache_namespace)

    async def idle(self) -> None:
        """Wait for a moment without a turn in progress."""
        await self._sessions.idle()

    async def in_flight(self) -> GatewayStats:
        """Close the sessions that were not finished in time, then return the current statistics."""
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
            coverage=self._sessions.coverage.coverage,
            failed_exports=self._exports.failed if self._exports else 0,
        )

    def _application(self, renderer: Renderer) -> web.Application:
        config = self._config
        app = web.Application(middlewares=[_json_errors])
        budget = BodyBudget(session_bytes=config.session_body_bytes, total_bytes=config.max_total_body_bytes)
        bodies = Bodies(budget=budget, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        AgentRoutes(
            self._sessions,
            self._turns,
            bodies=bodies,
            logger=self._agents_log,
            ping_s=config.ping_s,
            model_policy=config.model_policy,
            intake=self._intake,
        ).add_to(app)
        AdminRoutes(
            self._sessions,
            self._admin_token,
            lambda: config.advertise_url or self._base_url,
            decode=renderer.decode,
            exporter=self._exporter,
            bodies=bodies,
            max_context_tokens=config.max_context_tokens,
        ).add_to(app)
        return app

    def _connections(self) -> ConnectionSettings:
        return ConnectionSettings(
            header_timeout_s=self._config.header_timeout_s,
            send_timeout_s=self._config.send_timeout_s,
            refused=self._log_refused,
        )

    def _log_refused(self, path: str, reason: str, defect: BaseException | None) -> None:
        if defect is None:
            self._agents_log.warning(self._session_at(path), "request refused: %s", reason)
        else:
            self._agents_log.error(self._session_at(path), "request failed: %s", reason, exc_info=defect)

    def _session_at(self, path: str) -> str:
        """Return the id of the session whose token is in a path; "" if there is none."""
        token = path.removeprefix("/s/").partition("/")[0] if path.startswith("/s/") else ""
        try:
            return name_of(self._sessions.by_token(token))
        except LogBroken:
            return ""


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return JSON also for errors outside the routes (404, 405), and end a connection with an unread body."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(body=refusal_of(error.reason), status=error.status, content_type="application/json")
    await dismiss(request, response)
    return response
