"""HTTP routes for agents, in three dialects, with the session token in the path or as a bearer token or API key.

Invariants:
- Every failure becomes the dialect's own error body and status; an infra failure marks its session before the response
  is sent.
- Everything except the health routes needs a session; requests for an unknown or closed session are refused immediately
  with 400, so that agents do not retry. Their bodies are not read.
- What an agent can cause to be logged is limited for each session.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar

from aiohttp import web

from headrace.serve.gateway.conversation import TurnAnswer
from headrace.serve.gateway.dialects import fields
from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import Dialect, WireRequest
from headrace.serve.gateway.dialects.parse_work import ParseWork, brackets_of
from headrace.serve.gateway.dialects.responses import Responses
from headrace.serve.gateway.errors import (
    BadRequest,
    BodyUnreadable,
    GatewayBroken,
    InfraError,
    LogBroken,
    RequestTimeout,
    SessionUnknown,
    WireError,
)
from headrace.serve.gateway.http.bodies import Bodies
from headrace.serve.gateway.http.config import ModelUse
from headrace.serve.gateway.http.connections import CLIENT_LINGER_S, dismiss
from headrace.serve.gateway.http.delivery import Delivery, json_response
from headrace.serve.gateway.http.limited_log import LimitedLog
from headrace.serve.gateway.http.sessions import SessionTable
from headrace.serve.gateway.http.turns import FIRST, LiveSession, Retry, Turns
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT
from headrace.serve.tracing.foreign_spans import OtlpUnreadable, SpanIntake

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
Parsed = TypeVar("Parsed")

MAX_KEY_CHARACTERS = 256
_DEFECT = "Internal error of the gateway; see its log."
_ANTHROPIC, _CHAT, _RESPONSES = AnthropicMessages(), ChatCompletions(), Responses()


class AgentRoutes:
    """Handlers for a gateway's sessions and turns. `model_policy` pairs model name patterns with uses."""

    def __init__(
        self,
        sessions: SessionTable,
        turns: Turns,
        *,
        bodies: Bodies,
        logger: LimitedLog,
        ping_s: float,
        model_policy: Sequence[tuple[str, ModelUse]],
        intake: SpanIntake | None,
    ) -> None:
        self._sessions = sessions
        self._turns = turns
        self._bodies = bodies
        self._logger = logger
        self._ping_s = ping_s
        self._model_policy = model_policy
        self._intake = intake
        self._started_s = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Add every route twice: with the session token in the path, and with it in a header."""
        app.router.add_get("/healthz", alive)
        for prefix in ("", "/s/{token}"):
            app.router.add_get(prefix or "/", alive)
            app.router.add_post(f"{prefix}/v1/messages", self._turn_on(_ANTHROPIC))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._counts(_ANTHROPIC, _ANTHROPIC.parse_count))
            app.router.add_post(f"{prefix}/v1/chat/completions", self._turn_on(_CHAT))
            app.router.add_post(f"{prefix}/v1/responses", self._turn_on(_RESPONSES))
            app.router.add_post(f"{prefix}/v1/tokenize", self._guarded(_CHAT, self._tokenize))
            app.router.add_post(f"{prefix}/v1/responses/input_tokens", self._counts(_RESPONSES, _RESPONSES.parse))
            app.router.add_post(f"{prefix}/v1/traces", self._guarded(_CHAT, self._traces, marks=False))
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._models)
        app.router.add_get("/s/{token}/", alive)

    def _turn_on(self, dialect: Dialect) -> Handler:
        async def turn(request: web.Request) -> web.StreamResponse:
            asked_s, live = self._turns.now(), self._live(request)
            asked = await self._parsed(request, live, dialect.parse)
            uses = (use for pattern, use in self._model_policy if fnmatchcase(asked.turn.model, pattern))
            use = next(uses, ModelUse.TRAIN)
            if use is ModelUse.REFUSE:
                raise BadRequest(f"The model {asked.turn.model!r} is not served here (gateway.model_policy).", "model")

            sending: list[str] = []

            async def sample() -> TurnAnswer:
                # Raises only WireError, since a stream that has begun cannot report anything else.
                try:
                    # Of several samples it is unknown which one each retry has lost.
                    untrained, retry = use is ModelUse.SERVE, retry_of(request) if asked.samples == 1 else FIRST
                    found = await self._turns.answer(
                        live, asked.turn, untrained=untrained, asked_s=asked_s, retry=retry
                    )
                    sending.append(found.turn_id)
                    live.delivering[found.turn_id] += 1
                    return self._turns.with_tokens(live, found) if asked.token_fields.any else found
                except WireError:
                    raise
                except Exception:
                    self._logger.exception(name_of(live), "a turn failed")
                    raise GatewayBroken(_DEFECT) from None

            async def answers() -> Sequence[TurnAnswer]:
                if asked.samples == 1:
                    return [await sample()]
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(sample()) for _ in range(asked.samples)]
                except* WireError as failures:
                    raise failures.exceptions[0] from None
                return [task.result() for task in tasks]

            delivery = Delivery(
                dialect=dialect,
                asked=asked,
                ping_s=self._ping_s,
                created_s=int(time.time()),
                delivered=lambda answer: self._turns.delivered(live, answer),
                failed=lambda failure: mark(live, failure),
            )
            try:
                return await delivery.run(request, answers())
            finally:
                live.delivering.subtract(sending)
                live.delivering += Counter()

        return self._guarded(dialect, turn)

    def _counts(
        self, dialect: AnthropicMessages | Responses, parse: Callable[[bytes, Mapping[str, str]], WireRequest]
    ) -> Handler:
        """Return the handler that counts the tokens of a request's prompt."""

        async def count(request: web.Request) -> web.StreamResponse:
            live = self._live(request)
            asked = await self._parsed(request, live, parse)
            return json_response(dialect.count(await self._turns.prompts.count_tokens(live, asked.turn)))

        return self._guarded(dialect, count)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        asked = await self._parsed(request, live, _CHAT.parse_tokenize)
        if asked.turn is None:
            ids = await self._turns.prompts.tokenize_text(live, asked.prompt)
        else:
            ids = await self._turns.prompts.tokenize(live, asked.turn, opens_turn=asked.opens_turn)
        return json_response(_CHAT.tokenized(ids, live.core.spec.budgets.max_context_tokens))

    async def _traces(self, request: web.Request) -> web.StreamResponse:
        """Take spans of the agent's own, by OTLP/HTTP."""
        live = self._live(request)
        if self._intake is None or not live.agent_trace.span.is_valid:
            return json_response(_CHAT.error(BadRequest("This run does not record traces.")), 404)
        intake = self._intake

        async def taken(body: bytes) -> web.Response:
            content, content_type = await intake.take(body, request.content_type, live.agent_trace.adopted)
            return web.Response(body=content, content_type=content_type)

        try:
            return await self._bodies.parsed(request, live.core.spec.session_id, taken)
        except OtlpUnreadable as error:
            raise BadRequest(str(error)) from None

    async def _models(self, request: web.Request) -> web.StreamResponse:
        dialect = _ANTHROPIC if "anthropic-version" in request.headers else _CHAT

        async def models(request: web.Request) -> web.StreamResponse:
            self._live(request)
            if name := request.match_info.get("model"):
                return json_response(dialect.model(name, self._started_s))
            return json_response(dialect.models(self._started_s))

        return await self._guarded(dialect, models)(request)

    def _guarded(self, dialect: Dialect, handler: Handler, *, marks: bool = True) -> Handler:
        """Wrap a handler so that its failures are classified and reported in the dialect. With `marks`, those of ours
        make the session's outcome infra."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except WireError as error:
                # Its frames hold the body, and this one holds it: a cycle, which lasts until the next collection.
                failure = error.with_traceback(None)
            except ConnectionError:
                # The agent has disconnected, so nobody reads this response.
                return web.Response(status=499)
            except Exception:
                self._logger.exception(self._name(request), "request %s failed", request.path.rsplit("/", 1)[-1])
                failure = GatewayBroken(_DEFECT)
            if marks:
                with suppress(LogBroken):
                    mark(self._sessions.by_token(token_of(request)), failure)
            if isinstance(failure, BodyUnreadable):
                self._logger.warning(self._name(request), "%s", failure)
            response = json_response(dialect.error(failure), dialect.status(failure))
            if not isinstance(failure, SessionUnknown):
                # A client that did not send in time has had its time.
                linger_s = 0.0 if isinstance(failure, RequestTimeout) else CLIENT_LINGER_S
                await dismiss(request, response, most_bytes=self._bodies.most_dropped_bytes, linger_s=linger_s)
            return response

        return guarded

    async def _parsed(
        self, request: web.Request, live: LiveSession, parse: Callable[[bytes, Mapping[str, str]], Parsed]
    ) -> Parsed:
        """Return the parsed body of a request. Raises what `Bodies.parsed` raises."""

        async def parsed(body: bytes) -> Parsed:
            work = ParseWork(parse, body, dict(request.headers), brackets_of(body))
            found: Parsed = await self._turns.prompts.apart(live, work) if work.is_large else work()
            return found

        return await self._bodies.parsed(request, live.core.spec.session_id, parsed)

    def _name(self, request: web.Request) -> str:
        """Return the id of the session that a request is for; "" if there is none."""
        try:
            return name_of(self._sessions.by_token(token_of(request)))
        except LogBroken:
            return ""

    def _live(self, request: web.Request) -> LiveSession:
        live = self._sessions.by_token(token_of(request))
        if live is None:
            raise SessionUnknown("This session is unknown or closed.")
        # In the context of this request's task only.
        ROLLOUT_ATTEMPT.set(live.attempt)
        return live


def retry_of(request: web.Request) -> Retry:
    """Return what the headers say of earlier attempts at a request."""
    count = request.headers.get("x-stainless-retry-count", "0")
    key = fields.header(request.headers, "idempotency-key")[:MAX_KEY_CHARACTERS]
    return Retry(retried=count.isdecimal() and int(count[:9]) > 0, key=key)


def mark(live: LiveSession | None, failure: WireError) -> None:
    """Record an infra failure that is about to reach a session's agent."""
    if live is not None and isinstance(failure, InfraError):
        live.fail(f"{failure.code}: {failure}")


def name_of(live: LiveSession | None) -> str:
    return live.core.spec.session_id if live is not None else ""


def token_of(request: web.Request) -> str:
    """Return the session token: from the path, else the bearer token, else the API key; "" if there is none."""
    return request.match_info.get("token", "") or bearer_of(request) or request.headers.get("x-api-key", "")


def bearer_of(request: web.Request) -> str:
    """Return the bearer token; "" if there is none. The scheme is case-insensitive (RFC 9110, 11.1)."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def alive(_request: web.Request) -> web.StreamResponse:
    return json_response({"status": "ok"})
