"""The HTTP routes for workers: they open, finish, export and delete sessions, in JSON.

Invariant: every route needs the admin token, compared in constant time.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

import orjson
from aiohttp import web

from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.errors import AdminDenied, BadRequest, GatewayBroken, SessionUnknown, WireError
from headrace.serve.gateway.exports.export_form import ExportForm
from headrace.serve.gateway.http import codec
from headrace.serve.gateway.http.agent_routes import Handler, bearer_of
from headrace.serve.gateway.http.bodies import Bodies
from headrace.serve.gateway.http.connections import CLIENT_LINGER_S, dismiss
from headrace.serve.gateway.http.delivery import json_response
from headrace.serve.gateway.http.exports import Exporter
from headrace.serve.gateway.http.sessions import SessionTable

logger = logging.getLogger(__name__)


class AdminRoutes:
    """Handlers for a gateway's sessions. `base_url` returns the base of the URLs given to agents, `decode` returns the
    text of token ids, and `exporter` makes the documents of finished sessions."""

    def __init__(
        self,
        sessions: SessionTable,
        admin_token: str,
        base_url: Callable[[], str],
        *,
        decode: Callable[[Sequence[int]], str],
        exporter: Exporter,
        bodies: Bodies,
        max_context_tokens: int | None,
    ) -> None:
        self._sessions = sessions
        self._admin_token = admin_token.encode()
        self._base_url = base_url
        self._decode = decode
        self._exporter = exporter
        self._bodies = bodies
        self._max_context_tokens = max_context_tokens

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/sessions", self._guarded(self._open))
        app.router.add_post("/sessions/{session_id:.+}/finish", self._guarded(self._finish))
        app.router.add_get("/sessions/{session_id:.+}/export", self._guarded(self._export))
        app.router.add_delete("/sessions/{session_id:.+}", self._guarded(self._forget))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request) or b"{}"
        default_id = SessionId(f"session-{secrets.token_hex(8)}")
        limit = self._max_context_tokens
        spec = codec.read_spec(body, default_id, limit)
        requested = spec.budgets.max_context_tokens
        if limit is not None and requested > limit:
            raise BadRequest(
                f"max_context_tokens {requested} exceeds the engines' context length {limit} "
                "(gateway.max_context_tokens); request less.",
                "budgets.max_context_tokens",
            )
        live = self._sessions.open(spec)
        return json_response({"session_id": spec.session_id, "base_url": f"{self._base_url()}/s/{live.token}"})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        form = codec.read_form(codec.FinishForm, await self._body(request) or b"{}")
        finished = await self._sessions.finish(SessionId(request.match_info["session_id"]))
        if finished is None:
            raise SessionUnknown("This session is unknown or closed.")
        if form.packed:
            report = finished.with_conversation(self._decode) if form.conversation else finished.report
            return json_response(codec.write_report(report))
        document = codec.write_plain_report(finished.report)
        return json_response(document | {"tree": finished.tree} if form.tree else document)

    async def _export(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("form", ExportForm.ROWS)
        if name not in tuple(ExportForm):
            raise BadRequest(f"form must be one of {', '.join(ExportForm)}.", "form")
        finished = await self._sessions.finished(SessionId(request.match_info["session_id"]))
        pieces = await asyncio.to_thread(self._exporter.pieces, ExportForm(name), finished.session, finished.report)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        piece = await asyncio.to_thread(next, pieces, b"")
        with suppress(ConnectionError):
            await response.prepare(request)
            # Piece by piece, as fast as the client reads: a document may be much larger than its session.
            while piece:
                await response.write(piece)
                piece = await asyncio.to_thread(next, pieces, b"")
            await response.write_eof()
        return response

    async def _forget(self, request: web.Request) -> web.StreamResponse:
        if not await self._sessions.forget(SessionId(request.match_info["session_id"])):
            raise SessionUnknown("This session is unknown or closed.")
        return web.Response(status=204)

    async def _body(self, request: web.Request) -> bytes:
        return await self._bodies.of_worker(request)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                given = bearer_of(request).encode("utf-8", "surrogateescape")
                if not hmac.compare_digest(given, self._admin_token):
                    raise AdminDenied("This route needs Authorization: Bearer <admin token>.")
                return await handler(request)
            except WireError as error:
                # As for agents: otherwise the body stays until the next collection.
                failure = error.with_traceback(None)
            except Exception:
                logger.exception("admin request %s failed", request.method)
                failure = GatewayBroken("Internal error of the gateway; see its log.")
            reason = {"message": str(failure), "type": failure.code, "param": failure.field, "code": failure.code}
            response = json_response({"error": reason}, failure.status)
            if not isinstance(failure, AdminDenied):
                most_bytes = self._bodies.most_dropped_bytes
                await dismiss(request, response, most_bytes=most_bytes, linger_s=CLIENT_LINGER_S)
            return response

        return guarded


def refusal_of(reason: str) -> bytes:
    """Return the response body for a failure outside the routes."""
    return orjson.dumps({"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": None}})
