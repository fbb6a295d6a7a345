"""The pages of runs below the control API: the handlers of `headrace observe`, for requests with a key of the API.

Invariants:
- A browser gives its key once, in the form of the page, and gets a cookie for the pages of that run only, signed with a
  secret of this deployment.
- Without a key an answer says nothing about runs, and starts no process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import parse_qsl

from starlette.responses import RedirectResponse, Response

from headrace.actors.cluster.api.bodies import read_bytes, run_id_of
from headrace.actors.cluster.api.refusals import ApiRefusal
from headrace.actors.cluster.runs.records import ApiRole, Caller, RunId
from headrace.actors.telemetry.page.access import Door, PageAnswer, Secret, local_path
from headrace.actors.telemetry.page.page_processes import PageRequest

if TYPE_CHECKING:
    from fastapi import Request

    Ask = Callable[[RunId, PageRequest], Awaitable[PageAnswer]]

MAX_FORM_BYTES: Final = 16 << 10
STATIC: Final = "static/"
ASKED: Final = ("accept", "last-event-id", "if-none-match")
"""Headers of a request that the page knows."""
KEY: Final = Secret(name="key", hint="Enter a key of the control API that may see this run.")


class Visible(Protocol):
    """Checks of a caller."""

    def __call__(self, run_id: RunId, caller: Caller) -> Awaitable[RunId]:
        """Return the id of a run that the caller may see. Raises RunUnknown."""


class RunPages:
    """Routes of the pages. `user_of` returns the user of the key with a digest, `identify` that of a request's key, and
    `ask` asks the page of a run."""

    def __init__(
        self,
        *,
        secret: bytes,
        user_of: Callable[[bytes], Caller | None],
        identify: Callable[[Request, ApiRole], Caller],
        visible: Visible,
        ask: Ask,
    ) -> None:
        self._door = Door(KEY, secret, user_of)
        self._identify, self._visible, self._ask = identify, visible, ask

    async def root(self, request: Request) -> Response:
        """Lead to the path below which all links of a page are."""
        return RedirectResponse(f"{request.url.path.rpartition('/')[2]}/", status_code=303)

    async def view(self, request: Request) -> Response:
        """Answer with a view of the page, its data, or a part of its stream of events."""
        path = str(request.path_params["path"])
        if path.startswith(STATIC):
            if (file := self._door.file(path.removeprefix(STATIC), request.headers.get("if-none-match"))) is None:
                raise ApiRefusal(404, "route_unknown", "the page has no such file")
            return _response(file)
        keyed = "authorization" in request.headers
        caller = None if keyed else self._door.user_of_cookie(request.cookies, request.headers.get("host", ""))
        if caller is None and not keyed and "text/html" in request.headers.get("accept", ""):
            return _response(self._door.form(local_path(request.url.path)))
        caller = caller or self._identify(request, ApiRole.READ)
        run_id = await self._visible(run_id_of(request), caller)
        headers = {name: request.headers[name] for name in ASKED if name in request.headers}
        return _response(await self._ask(run_id, PageRequest(path=path, query=request.url.query, headers=headers)))

    async def login(self, request: Request) -> Response:
        """Exchange a key, given in the form, for a cookie."""
        # The cookie's path has the run's id.
        run_id_of(request)
        fields = dict(parse_qsl((await read_bytes(request, MAX_FORM_BYTES)).decode(errors="replace")))
        host, secure = request.headers.get("host", ""), request.url.scheme == "https"
        return _response(self._door.enter(fields, request.url.path, host, secure=secure))


def _response(answer: PageAnswer) -> Response:
    return Response(answer.body, status_code=answer.status, headers=dict(answer.headers))
