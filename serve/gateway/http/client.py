"""The worker's client for the admin routes, which opens and finishes sessions.

Invariants:
- The client uses one pooled HTTP session for its whole life; every call has a deadline.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from headrace.policies.sglang.transport import reason
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.errors import GatewayUnreachable, LogBroken, SessionUnknown
from headrace.serve.gateway.http import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """An opened session. The agent gets `base_url`; for OpenAI clients, `/v1` is appended to it. `gateway` names the
    gateway that has it, where there are several."""

    session_id: SessionId
    base_url: str
    gateway: str = ""


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

    async def open(self, spec: SessionSpec) -> OpenedSession:
        """Open a session. Raises GatewayUnreachable, also if the gateway refuses (id in use, wrong token, invalid
        spec)."""
        answer = await self._post("/sessions", asdict(spec))
        return OpenedSession(session_id=SessionId(answer["session_id"]), base_url=answer["base_url"])

    async def finish(self, session_id: SessionId, *, conversation: bool = False) -> SessionReport:
        """Close a session and return its report, which includes every turn as text if `conversation` is true. Raises
        SessionUnknown, GatewayUnreachable."""
        path = f"/sessions/{quote(session_id, safe='')}/finish"
        try:
            report = await self._post(path, {"packed": True, "conversation": conversation})
        except GatewayUnreachable as error:
            if error.code in (SessionUnknown.code, LogBroken.code):
                raise SessionUnknown(f"{error} (it was closed, or lost in a restart)") from error
            raise
        return codec.read_report(report)

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        if self._http is None:
            raise RuntimeError("use GatewayClient as an async context manager")
        try:
            async with self._http.post(URL(self._url + path, encoded=True), data=orjson.dumps(body)) as response:
                data = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise GatewayUnreachable(f"gateway {self._url}{path}: {reason(error)}") from error
        if status != 200:
            answer = f"gateway {self._url}{path} answered {status}: {data[:500].decode(errors='replace')}"
            raise GatewayUnreachable(answer, answered=True, code=_code_of(data))
        document: dict[str, Any] = orjson.loads(data)
        return document


def _code_of(data: bytes) -> str:
    """Return the code of the gateway's error, "" for an answer of something else."""
    with suppress(orjson.JSONDecodeError, TypeError, KeyError):
        return str(orjson.loads(data)["error"]["code"])
    return ""
