"""The routes of agents: three wires, for a session named in the path, by a bearer token or by an API key.

Invariants:
- Every failure becomes the wire's own error body and status; an infra failure marks its session before a byte of it
  leaves.
- Nothing is served without a session but the signs of life; an unknown or closed session is 400 at once, so that no
  agent retries.
"""

from __future__ import annotations

import logging
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from aiohttp import web

from headrace.serve.dialects.anthropic import AnthropicMessages
from headrace.serve.dialects.chat import ChatCompletions
from headrace.serve.dialects.responses import Responses
from headrace.serve.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayBroken,
    InfraError,
    LogBroken,
    SessionUnknown,
    WireError,
)
from headrace.serve.gateway.config import ModelUse
from headrace.serve.gateway.delivery import Delivery, json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.serve.conversation import TurnAnswer, TurnRequest
    from headrace.serve.dialects.dialect import Dialect
    from headrace.serve.gateway.sessions import SessionTable
    from headrace.serve.gateway.turns import LiveSession, Turns

logger = logging.getLogger(__name__)

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"

_DEFECT = "The gateway failed; see its log."
_ANTHROPIC, _CHAT, _RESPONSES = AnthropicMessages(), ChatCompletions(), Responses()


class AgentRoutes:
    """Handlers over the sessions and turns of one gateway. `model_policy` pairs patterns of model names with uses."""

    def __init__(
        self,
        sessions: SessionTable,
        turns: Turns,
        *,
        max_body_bytes: int,
        ping_s: float,
        model_policy: Sequence[tuple[str, ModelUse]],
    ) -> None:
        self._sessions = sessions
        self._turns = turns
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s
        self._model_policy = model_policy
        self._started_s = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Every route twice: with the session in the path, and with it in a header."""
        app.router.add_get("/healthz", alive)
        for prefix in ("", "/s/{token}"):
            app.router.add_get(prefix or "/", alive)
            app.router.add_post(f"{prefix}/v1/messages", self._turn_on(_ANTHROPIC))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._guarded(_ANTHROPIC, self._count_tokens))
            app.router.add_post(f"{prefix}/v1/chat/completions", self._turn_on(_CHAT))
            app.router.add_post(f"{prefix}/v1/responses", self._turn_on(_RESPONSES))
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_get("/s/{token}/", alive)

    def _turn_on(self, dialect: Dialect) -> Handler:
        async def turn(request: web.Request) -> web.StreamResponse:
            return await self._turn(request, dialect)

        return self._guarded(dialect, turn)

    async def _turn(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        live = self._live(request)
        asked = dialect.parse(await read_body(request, self._max_body_bytes), request.headers)

        def delivered(answer: TurnAnswer) -> None:
            self._turns.delivered(live, answer)

        delivery = Delivery(
            dialect=dialect,
            asked=asked,
            ping_s=self._ping_s,
            created_s=int(time.time()),
            delivered=delivered,
            failed=lambda failure: mark(live, failure),
        )
        untrained = self._use_of(asked.turn) is ModelUse.SERVE
        return await delivery.run(request, self._answer(live, asked.turn, untrained=untrained))

    async def _answer(self, live: LiveSession, turn: TurnRequest, *, untrained: bool) -> TurnAnswer:
        """Raises WireError only: a stream that has begun can tell nothing else."""
        try:
            return await self._turns.answer(live, turn, untrained=untrained)
        except WireError:
            raise
        except Exception:
            logger.exception("a turn failed")
            raise GatewayBroken(_DEFECT) from None

    def _use_of(self, turn: TurnRequest) -> ModelUse:
        for pattern, use in self._model_policy:
            if fnmatchcase(turn.model, pattern):
                if use is ModelUse.REFUSE:
                    raise BadRequest(f"The model {turn.model!r} is not served here (gateway.model_policy).", "model")
                return use
        return ModelUse.TRAIN

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        asked = _ANTHROPIC.parse_count(await read_body(request, self._max_body_bytes), request.headers)
        return json_response(_ANTHROPIC.count(await self._turns.count_tokens(live, asked.turn)))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        dialect = _ANTHROPIC if "anthropic-version" in request.headers else _CHAT

        async def models(request: web.Request) -> web.StreamResponse:
            self._live(request)
            return json_response(dialect.models(self._started_s))

        return await self._guarded(dialect, models)(request)

    def _guarded(self, dialect: Dialect, handler: Handler) -> Handler:
        """Where failures are classified."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except WireError as error:
                failure = error
            except web.HTTPRequestEntityTooLarge:
                failure = BodyTooLarge(f"The body is larger than {self._max_body_bytes} bytes.")
            except ConnectionError:
                # The agent is gone: nobody reads an answer.
                return web.Response(status=499)
            except Exception:
                logger.exception("request %s failed", request.path.rsplit("/", 1)[-1])
                failure = GatewayBroken(_DEFECT)
            mark(self._session_of(request), failure)
            return json_response(dialect.error(failure), dialect.status(failure))

        return guarded

    def _live(self, request: web.Request) -> LiveSession:
        live = self._sessions.by_token(token_of(request))
        if live is None:
            raise SessionUnknown("This session is unknown or closed.")
        return live

    def _session_of(self, request: web.Request) -> LiveSession | None:
        try:
            return self._sessions.by_token(token_of(request))
        except LogBroken:
            return None


def mark(live: LiveSession | None, failure: WireError) -> None:
    """Remember an infra failure that is about to reach the agent of a session."""
    if live is not None and isinstance(failure, InfraError):
        live.fail(f"{failure.code}: {failure}")


def token_of(request: web.Request) -> str:
    """The session's token: in the path, else a bearer token, else an API key; "" when there is none."""
    return request.match_info.get("token", "") or bearer_of(request) or request.headers.get("x-api-key", "")


def bearer_of(request: web.Request) -> str:
    """The bearer token; "" when there is none. The scheme's case does not matter (RFC 9110, 11.1)."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Raises BodyTooLarge, BadRequest."""
    # Refused by its declared length before a byte is read; a body without one is cut off by aiohttp while reading.
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        # The sender's own broken encoding: as a failure of ours it would turn a rollout into infra.
        raise BadRequest(f"The body cannot be decoded: {' '.join(str(error).split())}") from None


async def alive(_request: web.Request) -> web.StreamResponse:
    return json_response({"status": "ok"})
