"""The control API: HTTP routes over the actor that supervises runs.

Invariants:
- The app has no state of its own: any replica answers any request.
- A request is authenticated before its body is read. To all but admins, runs of other owners do not exist (404).
- Every call of the actor has a time limit. Its errors become answers in `refusals`; no request fails with a traceback.
- Requests may be repeated: submissions by their Idempotency-Key, the others by nature, except `resume`.
- Routes of operations follow from `contract.RunsApi`; those here are of other forms.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from headrace.actors.cluster.api.bodies import check_query, read_content, run_id_of
from headrace.actors.cluster.api.keys import KeyFile
from headrace.actors.cluster.api.pages import RunPages
from headrace.actors.cluster.api.refusals import ApiRefusal, answer, refusal_of, refused
from headrace.actors.cluster.runs.contract import RUN, EventPage, RunsApi
from headrace.actors.cluster.runs.operations import IDEMPOTENCY_KEY, Operation, operations_of
from headrace.actors.cluster.runs.records import ActualState, ApiRole, Caller, RunId, RunRecord
from headrace.actors.errors import ActorMissing, ConfigError, RunsMissing
from headrace.actors.runtime.actors.event_stream import POLL_S, event_stream
from headrace.actors.telemetry.page.access import digest_of
from headrace.actors.telemetry.page.page_processes import ANSWER_S

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]

CALL_S: Final = 20.0
"""Time limit of a call of the actor."""
_NUMBER: Final = re.compile(r"[0-9]{0,15}")
PAGE_S: Final = 2 * ANSWER_S
"""Time for the process of a page to start and to answer."""


def make_app(runs: RunsApi, keys: KeyFile, secret: bytes) -> FastAPI:
    """Return the app, without pages of documentation, which would need no key. `secret`, which all replicas have, signs
    the cookies of browsers."""
    app = FastAPI(title="headrace", docs_url=None, redoc_url=None, openapi_url=None)
    api = ControlApi(runs, keys, secret)
    for method, path, handler in api.routes():
        app.add_api_route(path, handler, methods=[method], response_model=None)

    async def unknown_route(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return refused(status, "route_unknown", f"there is no {request.method} {request.url.path[:200]}")

    app.add_exception_handler(HTTPException, unknown_route)
    return app


def user_of(keys: KeyFile, digest: bytes) -> Caller | None:
    """Return the user of the key with this digest. Raises ApiRefusal if the key file is refused now."""
    try:
        return keys.caller_of(digest)
    except ConfigError as error:
        logger.error("%s", error)
        raise ApiRefusal(503, "keys_refused", "the API's key file is refused: the API's log has the reason") from error


class ControlApi:
    """All routes."""

    def __init__(self, runs: RunsApi, keys: KeyFile, secret: bytes) -> None:
        self._runs = runs
        self._keys = keys
        self._pages = RunPages(
            secret=secret,
            user_of=partial(user_of, keys),
            identify=self._caller,
            visible=self._visible,
            ask=lambda run_id, page: self._call(lambda runs: runs.page(run_id, page), timeout_s=PAGE_S),
        )

    def routes(self) -> list[tuple[str, str, Handler]]:
        operations = operations_of(RunsApi)
        return [
            ("GET", "/healthz", self._healthz),
            ("GET", "/readyz", self._guarded(self._readyz)),
            ("GET", "/v1/metrics/targets", self._guarded(self._targets)),
            ("GET", f"{RUN}/events", self._guarded(self._events)),
            ("GET", f"{RUN}/page", self._guarded(self._pages.root)),
            ("GET", f"{RUN}/page/{{path:path}}", self._guarded(self._pages.view)),
            ("POST", f"{RUN}/page/login", self._guarded(self._pages.login)),
            *((one.method, one.path, self._guarded(partial(self._operate, one))) for one in operations),
        ]

    def _guarded(self, work: Callable[[Request], Awaitable[Response]]) -> Handler:
        """Return a handler that answers errors of `work`."""

        async def handler(request: Request) -> Response:
            try:
                return await work(request)
            except Exception as error:  # noqa: BLE001 - the one boundary
                return refusal_of(error)

        return handler

    def _caller(self, request: Request, role: ApiRole) -> Caller:
        """Return the user of the request's key. Raises ApiRefusal."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiRefusal(401, "key_missing", "send the header `Authorization: Bearer KEY`")
        caller = user_of(self._keys, digest_of(key.strip()))
        if caller is None:
            raise ApiRefusal(401, "key_wrong", "the key is unknown: ask the operator of this cluster for one")
        if caller.role < role:
            needed = role.name.lower()
            raise ApiRefusal(
                403, "role_too_small", f"the key has the role {caller.role.name.lower()}: {needed} is needed"
            )
        return caller

    async def _operate(self, operation: Operation, request: Request) -> Response:
        """Answer with the result of an operation."""
        caller = self._caller(request, operation.role)
        arguments = {name: request.path_params[place] for name, place in operation.in_path.items()}
        if "run_id" in arguments:
            arguments["run_id"] = run_id_of(request)
        if IDEMPOTENCY_KEY in operation.parameters:
            if not (key := request.headers.get("idempotency-key", "")):
                hint = "send a header Idempotency-Key, such as a UUID, for each run"
                raise ApiRefusal(400, "idempotency_key_missing", hint)
            arguments[IDEMPOTENCY_KEY] = key
        try:
            content = await read_content(request, operation)
        except ApiRefusal:
            # A run that does not exist for this caller is answered as that, whatever the request contains.
            if "run_id" in arguments:
                await self._visible(arguments["run_id"], caller)
            raise
        arguments |= operation.arguments(content)
        result = await self._perform(operation.name, caller, arguments, CALL_S + operation.wait_s(vars(content)))
        if isinstance(result, bytes):
            return Response(result, media_type="application/json")
        return answer({operation.key: result} if operation.key else result, operation.status)

    async def _visible(self, run_id: RunId, caller: Caller) -> RunId:
        """Return the id of a run that the caller may see. Raises RunUnknown."""
        await self._perform("run", caller, {"run_id": run_id})
        return run_id

    async def _perform(
        self, method: str, caller: Caller, arguments: Mapping[str, Any], timeout_s: float = CALL_S
    ) -> Any:
        return await self._call(lambda runs: runs.perform(method, caller, arguments), timeout_s)

    async def _call(self, work: Callable[[RunsApi], Awaitable[T]], timeout_s: float = CALL_S) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await work(self._runs)
        except ActorMissing as error:
            raise RunsMissing(
                "this cluster has no service of runs: start it with `headrace run --address ADDRESS --detach RECIPE`"
            ) from error

    async def _healthz(self, request: Request) -> Response:
        return answer({"ok": True})

    async def _readyz(self, request: Request) -> Response:
        """Answer whether the service of runs answers, and with `?run=` whether that run gets on."""
        check_query(request, "run")
        if not (run := request.query_params.get("run", "")):
            await self._perform("runs", Caller(owner="", role=ApiRole.READ), {})
            return answer({"ready": True})
        request.path_params["run"] = run
        caller = self._caller(request, ApiRole.READ)
        readiness = await self._perform("ready", caller, {"run_id": run_id_of(request)})
        return answer({"ready": readiness.is_ready, **asdict(readiness)}, 200 if readiness.is_ready else 503)

    async def _targets(self, request: Request) -> Response:
        """Answer with the pages of the runs that have a service, as Prometheus' discovery over HTTP reads them."""
        check_query(request)
        runs: tuple[RunRecord, ...] = await self._perform("runs", self._caller(request, ApiRole.READ), {})
        below = request.url.path.removesuffix("/metrics/targets")
        labels = [
            {
                "instance": f"{run.name}-{run.run_id[:8]}",
                "__scheme__": request.url.scheme,
                "__metrics_path__": f"{below}/runs/{run.run_id}/page/metrics",
            }
            for run in runs
            if run.is_live and run.actual is not ActualState.WAITING
        ]
        return answer([{"targets": [request.url.netloc], "labels": each} for each in labels])

    async def _events(self, request: Request) -> Response:
        caller, last = self._caller(request, ApiRole.READ), request.headers.get("last-event-id", "")
        check_query(request)
        run_id = run_id_of(request)
        if not _NUMBER.fullmatch(last):
            raise ApiRefusal(400, "query_invalid", "Last-Event-ID must be the number of an event")
        after = int(last or 0)

        async def next_page(after: int, wait_s: float = POLL_S) -> EventPage:
            arguments = {"run_id": run_id, "after": after, "wait_s": wait_s}
            page: EventPage = await self._perform("events", caller, arguments, wait_s + CALL_S)
            return page

        first = await next_page(after, 0.0)
        if last and first.ended and not first.events:
            # Browsers reconnect after the end of a stream until they get this status.
            return Response(status_code=204)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(event_stream(first, after, next_page), media_type="text/event-stream", headers=headers)
