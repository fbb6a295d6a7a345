"""Who may see the page of a run, whatever serves it: keys, the cookie that stands for one, the Host header, and the
headers of every answer.

Invariants:
- Without a key an answer says nothing about the run: the form, scripts and styles are those of the package.
- A key comes as `Authorization: Bearer KEY`, or once by the form, which sets a cookie that scripts and other sites
  cannot read or send. It is signed with a secret of the server, holds the key's digest, not the key, and ends after
  `COOKIE_S`; a key that is no longer known opens nothing. A token in a URL's fragment never leaves the browser but
  through the form.
- A request of `headrace observe` whose Host is neither an address nor a name of the server is refused: a foreign name
  that resolves to this address (DNS rebinding) gets nothing.
- Every answer has the headers of `HEADERS`; scripts and styles come from files of this server only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Generic, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from headrace.actors.telemetry.page.rendering import make_environment, static_files

C = TypeVar("C")

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
HTML: Final = "text/html; charset=utf-8"
COOKIE: Final = "headrace-page"
COOKIE_S: Final = 12 * 3600
NEEDED: Final = (
    "this page needs its token: open the URL that `headrace observe` printed, or send Authorization: Bearer TOKEN"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """An answer of a page, for any framework."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What a page needs, in words of the form: its name, and a sentence that says where users find it."""

    name: str
    hint: str


TOKEN: Final = Secret(
    name="token", hint="Open the URL that \u201cheadrace observe\u201d printed, or enter the token that it ends with."
)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class Door(Generic[C]):
    """Answers to requests that have not shown a key. `user_of` returns who has the key with a digest, or None; `secret`
    signs cookies. `host` is always the Host header of a request."""

    def __init__(self, asked: Secret, secret: bytes, user_of: Callable[[bytes], C | None]) -> None:
        self._asked, self._secret, self._user_of = asked, secret, user_of
        self._template = make_environment().get_template("login.html")
        self._static = static_files()

    def user_of_key(self, key: str) -> C | None:
        """Return who has a key; None for an unknown or empty one."""
        return self._user_of(digest_of(key.strip())) if key.strip() else None

    def user_of_cookie(self, cookies: Mapping[str, str], host: str) -> C | None:
        """Return who has the key that a request's cookie stands for; None without a valid cookie."""
        given = cookies.get(_cookie_name(host), "")
        try:
            ends, digest_text, _ = given.split(".")
            ends_s, digest = int(ends), bytes.fromhex(digest_text)
        except ValueError:
            return None
        if not hmac.compare_digest(self._signed(ends_s, digest).encode(), given.encode(errors="replace")):
            return None
        return self._user_of(digest) if time.time() < ends_s else None

    def form(self, path: str, *, wrong: bool = False) -> PageAnswer:
        """Ask for a key, and lead to the view at `path` afterwards; `wrong` says that an unknown one was given."""
        text = self._template.render(next=path, secret=self._asked, wrong=wrong)
        return _answer(HTTPStatus.UNAUTHORIZED, text.encode(errors="replace"), {"Content-Type": HTML})

    def enter(self, fields: Mapping[str, object], path: str, host: str, *, secure: bool) -> PageAnswer:
        """Exchange the key in the fields of the form, which was sent to `path`, for a cookie."""
        below = f"{path.rpartition('/')[0]}/"
        key, following = str(fields.get("token", "")).strip(), local_path(str(fields.get("next", "")), below)
        if self.user_of_key(key) is None:
            return self.form(following, wrong=True)
        value = self._signed(int(time.time()) + COOKIE_S, digest_of(key))
        cookie = f"{_cookie_name(host)}={value}; Max-Age={COOKIE_S}; Path={below}; HttpOnly; SameSite=Strict"
        cookie += "; Secure" if secure else ""
        return _answer(HTTPStatus.SEE_OTHER, b"", {"Location": following, "Set-Cookie": cookie})

    def file(self, name: str, known: str | None) -> PageAnswer | None:
        """Return a script or style, without its body if `known` is its ETag; None if there is no such file."""
        if (found := self._static.get(name)) is None:
            return None
        body, kind, digest = found
        headers = {"Content-Type": f"{kind}; charset=utf-8", "ETag": f'"{digest}"', "Cache-Control": "no-cache"}
        if known == headers["ETag"]:
            return _answer(HTTPStatus.NOT_MODIFIED, b"", headers)
        return _answer(HTTPStatus.OK, body, headers)

    def _signed(self, ends_s: int, digest: bytes) -> str:
        content = f"{ends_s}.{digest.hex()}"
        return f"{content}.{hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()}"


class Access:
    """Check of requests to `headrace observe`. `hosts` are names of this server beside its addresses, `localhost`."""

    def __init__(self, token: str, hosts: Container[str] = ()) -> None:
        digest, self._hosts = digest_of(token), hosts
        self.door = Door(TOKEN, token.encode(), lambda given: hmac.compare_digest(given, digest) or None)

    def allows(self, request: web.Request) -> bool:
        """Return True if the request carries the token, or the cookie that the form has set."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.door.user_of_key(given) is not None
        return self.door.user_of_cookie(request.cookies, request.headers.get("Host", "")) is not None

    def expects(self, host: str) -> bool:
        """Return True if a Host header names this server."""
        name = without_port(host).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost" or name in self._hosts
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


def local_path(path: str, below: str = "/") -> str:
    """Return a path `below` one of this page for a path that a form gave; the overview for anything else."""
    # Browsers take `//host` and `/\\host` for other hosts.
    harmless = path.startswith(below) and not path.startswith(("//", "/\\")) and path.isascii() and path.isprintable()
    return path if harmless else "."


def _answer(status: int, body: bytes, headers: Mapping[str, str]) -> PageAnswer:
    return PageAnswer(status=status, headers={**HEADERS, "Cache-Control": "no-store", **headers}, body=body)


def _cookie_name(host: str) -> str:
    """Return the cookie's name: cookies are not kept apart by port, and two runs may be shown on one host."""
    _, _, port = host.rpartition(":")
    return f"{COOKIE}-{port}" if port.isdigit() else COOKIE


def without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
