"""Who may see the page of a run: the token, the Host header, and the headers of every answer.

Invariants:
- Without the token an answer says nothing about the run. Tokens are compared in constant time.
- The token comes as `Authorization: Bearer TOKEN`, or once by the form, which sets a cookie that scripts and other
  sites cannot read or send. The cookie holds a digest, not the token. A token in a URL's fragment never leaves the
  browser but through the form.
- A request whose Host is neither an address nor a name of this server is refused: a foreign name that resolves to this
  address (DNS rebinding) gets nothing.
- Every answer has the headers of `HEADERS`; scripts and styles come from files of this server only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
COOKIE: Final = "headrace-observe"
NEEDED: Final = (
    "this page needs its token: open the URL that `headrace observe` printed, or send Authorization: Bearer TOKEN"
)


@dataclass(frozen=True, slots=True)
class Access:
    """Check of requests. `hosts` are names of this server, beside its addresses and `localhost`."""

    token: str = field(repr=False)
    hosts: frozenset[str] = frozenset()

    def knows(self, token: str) -> bool:
        """Return True for the token."""
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    @property
    def cookie(self) -> str:
        """Value of the cookie: who reads a browser's files does not learn the token itself."""
        return hmac.new(self.token.encode(), b"cookie of the page", hashlib.sha256).hexdigest()

    def allows(self, request: web.Request) -> bool:
        """Return True if the request carries the token, or the cookie that the form has set."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.knows(given.strip())
        cookie = request.cookies.get(cookie_name(request), "")
        return hmac.compare_digest(cookie.encode(errors="replace"), self.cookie.encode())

    def expects(self, host: str) -> bool:
        """Return True if a Host header names this server."""
        name = without_port(host).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost" or name in self.hosts
        return True

    def middleware(self, refuse: Handler, open_routes: Container[str | None]) -> Middleware:
        """Return the middleware; `refuse` answers requests without the token, except those of the open routes."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self.expects(request.headers.get("Host", "")):
                text = "the Host header names another server: use the address or name on which this page listens\n"
                return web.Response(status=HTTPStatus.MISDIRECTED_REQUEST, text=text)
            may = request.match_info.route.name in open_routes or self.allows(request)
            return await (handler if may else refuse)(request)

        return checked


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler that adds `HEADERS` to an answer, whoever made it."""
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")


def cookie_name(request: web.Request) -> str:
    """Return the cookie's name: cookies are not kept apart by port, and two runs may be shown on one host."""
    _, _, port = request.headers.get("Host", "").rpartition(":")
    return f"{COOKIE}-{port}" if port.isdigit() else COOKIE


def without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
