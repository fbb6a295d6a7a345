"""The pages of runs below the control API: the handlers of `headrace observe`, for requests with a key of the API.

Invariants:
- A browser gives its key once, in a form, and gets a cookie for the pages of that run only. The cookie is signed with a
  secret of this deployment, holds the key's digest, and ends after `COOKIE_S`; a key that was removed opens nothing.
- Without a key an answer says nothing about runs: scripts and styles are those of the package.
- Every answer has the page's headers, its policy among them.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import parse_qs

from starlette.responses import RedirectResponse, Response

from headrace.actors.cluster.api.bodies import read_bytes, run_id_of
from headrace.actors.cluster.api.keys import digest_of
from headrace.actors.cluster.api.refusals import Refusal
from headrace.actors.cluster.runs.records import Caller, Role, RunId
from headrace.actors.telemetry.page.access import HEADERS
from headrace.actors.telemetry.page.login import Secret, local_path, login_form
from headrace.actors.telemetry.page.page_processes import PageAnswer, PageRequest
from headrace.actors.telemetry.page.rendering import make_environment, static_files

if TYPE_CHECKING:
    from fastapi import Request

    Ask = Callable[[RunId, PageRequest], Awaitable[PageAnswer]]

COOKIE: Final = "headrace-page"
COOKIE_S: Final = 12 * 3600
MAX_FORM_BYTES: Final = 16 << 10
STATIC: Final = "static/"
ASKED: Final = ("accept", "last-event-id", "if-none-match")
"""Headers of a request that the page knows."""
KEY: Final = Secret(name="key", hint="Enter a key of the control API that may see this run.")


class Visible(Protocol):
    """Checks of a caller."""

    def __call__(self, run_id: RunId, caller: Caller) -> Awaitable[RunId]:
        """Return the id of a run that the caller may see. Raises RunUnknown."""
        ...


class RunPages:
    """Routes of the pages. `user_of` returns the user of the key with a digest, `identify` that of a request's key, and
    `ask` asks the page of a run."""

    def __init__(
        self,
        *,
        secret: bytes,
        user_of: Callable[[bytes], Caller | None],
        identify: Callable[[Request, Role], Caller],
        visible: Visible,
        ask: Ask,
    ) -> None:
        self._secret, self._user_of = secret, user_of
        self._identify, self._visible, self._ask = identify, visible, ask
        self._templates = make_environment()
        self._static = static_files()

    async def root(self, request: Request) -> Response:
        """Lead to the path below which all links of a page are."""
        return RedirectResponse(f"{request.url.path.rpartition('/')[2]}/", status_code=303)

    async def view(self, request: Request) -> Response:
        """Answer with a view of the page, its data, or a part of its stream of events."""
        path = str(request.path_params["path"])
        if path.startswith(STATIC):
            return self._file(request, path.removeprefix(STATIC))
        keyed = "authorization" in request.headers
        caller = None if keyed else self._of_cookie(request)
        if caller is None and not keyed and "text/html" in request.headers.get("accept", ""):
            return self._form(local_path(request.url.path), status=401)
        caller = caller or self._identify(request, Role.READ)
        run_id = await self._visible(run_id_of(request), caller)
        headers = {name: request.headers[name] for name in ASKED if name in request.headers}
        answer = await self._ask(run_id, PageRequest(path=path, query=request.url.query, headers=headers))
        return Response(answer.body, status_code=answer.status, headers={**answer.headers})

    async def login(self, request: Request) -> Response:
        """Exchange a key, given in a form, for a cookie."""
        below = f"{request.url.path.rpartition('/')[0]}/"
        form = parse_qs((await read_bytes(request, MAX_FORM_BYTES)).decode(errors="replace"))
        key, path = form.get("token", [""])[0].strip(), local_path(form.get("next", [""])[0], below)
        if not key or self._user_of(digest_of(key)) is None:
            return self._form(path, status=401, wrong=True)
        answer = RedirectResponse(path, status_code=303, headers=_protected())
        answer.set_cookie(
            COOKIE,
            self._signed(int(time.time()) + COOKIE_S, digest_of(key)),
            max_age=COOKIE_S,
            path=below,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _form(self, path: str, *, status: int, wrong: bool = False) -> Response:
        text = login_form(self._templates, path, KEY, wrong=wrong)
        return Response(text, status_code=status, media_type="text/html", headers=_protected())

    def _file(self, request: Request, name: str) -> Response:
        if (found := self._static.get(name)) is None:
            raise Refusal(404, "route_unknown", "the page has no such file")
        body, kind, digest = found
        headers = {**_protected(), "ETag": f'"{digest}"', "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    def _signed(self, ends_s: int, digest: bytes) -> str:
        content = f"{ends_s}.{digest.hex()}"
        return f"{content}.{hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()}"

    def _of_cookie(self, request: Request) -> Caller | None:
        """Return the user of the request's cookie; None without a valid one."""
        given = request.cookies.get(COOKIE, "")
        try:
            ends, digest_text, _ = given.split(".")
            ends_s, digest = int(ends), bytes.fromhex(digest_text)
        except ValueError:
            return None
        if not hmac.compare_digest(self._signed(ends_s, digest).encode(), given.encode(errors="replace")):
            return None
        return self._user_of(digest) if time.time() < ends_s else None


def _protected() -> Mapping[str, str]:
    return {**HEADERS, "Cache-Control": "no-store"}
