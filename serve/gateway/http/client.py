"""The worker's client for the admin routes, which opens and finishes sessions in batches.

Invariants:
- The client uses one pooled HTTP session for its whole life; every call has a deadline.
- A session that the gateway does not know (after a restart) is a value in the result of `finish`, not an exception, so
  that the other sessions of the batch keep their trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp
import orjson

from headrace.policies.sglang.transport import reason
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.errors import GatewayUnreachable, SessionUnknown
from headrace.serve.gateway.http import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """An opened session. The agent gets `base_url`; for OpenAI clients, `/v1` is appended to it."""

    session_id: SessionId
    base_url: str


class GatewayClient:
    """Client for one gateway's admin routes, used as an async context manager."""

    def __init__(self, url: str, admin_token: str, *, timeout_s: float = 30.0) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {admin_token}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def open(self, specs: Sequence[SessionSpec]) -> list[OpenedSession]:
        """Open all sessions or none, in order. Raises GatewayUnreachable, also if the gateway refuses (id in use, wrong
        token, invalid spec)."""
        answer = await self._post("/sessions", codec.open_body(specs))
        return [
            OpenedSession(session_id=SessionId(entry["session_id"]), base_url=entry["base_url"])
            for entry in answer["sessions"]
        ]

    async def finish(
        self, session_ids: Sequence[SessionId], *, conversation: bool = False
    ) -> list[SessionReport | SessionUnknown]:
        """Close the sessions and return their reports, in order; the reports include every turn as text if
        `conversation` is true. Raises GatewayUnreachable."""
        body: dict[str, object] = {"session_ids": list(session_ids), "conversation": conversation}
        answer = await self._post("/sessions/finish", body)
        unknown = "the gateway does not know session {} (it was closed, or lost in a restart)"
        return [
            SessionUnknown(unknown.format(entry["session_id"])) if "error" in entry else codec.read_report(entry)
            for entry in answer["reports"]
        ]

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, list[dict[str, str]]]:
        if self._http is None:
            raise RuntimeError("use GatewayClient as an async context manager")
        try:
            async with self._http.post(self._url + path, data=orjson.dumps(body)) as response:
                data = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayUnreachable(f"gateway {self._url}{path}: {reason(error)}") from error
        if status != 200:
            raise GatewayUnreachable(
                f"gateway {self._url}{path} answered {status}: {data[:500].decode(errors='replace')}", answered=True
            )
        answer: dict[str, list[dict[str, str]]] = orjson.loads(data)
        return answer
