"""The control API: HTTP routes over the actor that supervises runs.

Invariants:
- The app has no state of its own: any replica answers any request.
- A request is authenticated before its body is read. To all but admins, runs of other owners do not exist (404).
- Every call of the actor has a time limit. Its errors become answers in `refusals`; no request fails with a traceback.
- Requests may be repeated: submissions by their Idempotency-Key, the others by nature, except `resume`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from headrace.actors.cluster.api.bodies import (
    AddEngineBody,
    DrainNodeBody,
    ResumeBody,
    SubmitBody,
    check_query,
    read_body,
    run_id_of,
    unknown_run,
    whole_number,
)
from headrace.actors.cluster.api.keys import KeyFile
from headrace.actors.cluster.api.pages import RunPages
from headrace.actors.cluster.api.refusals import Refusal, answer, refusal_of, refused
from headrace.actors.cluster.runs.contract import LEAVE_S, EventPage, RunsApi
from headrace.actors.cluster.runs.records import ActualState, Caller, Role, RunId, RunRecord, Submission
from headrace.actors.errors import ActorGone, ActorLost, ConfigError, RunUnknown
from headrace.actors.runtime.actors.event_stream import POLL_S, event_stream
from headrace.actors.telemetry.page.access import digest_of
from headrace.actors.telemetry.page.page_processes import ANSWER_S
from headrace.actors.training.trainer_calls import Commit, Release, Take, TrainerCall, Weights

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work: TypeAlias = Callable[[Request, "Caller"], Awaitable[Response]]
RunWork: TypeAlias = Callable[[Request, "RunId", "Caller"], Awaitable[Response]]
Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]

CALL_S: Final = 20.0
"""Time limit of a call of the actor."""
LOG_BYTES: Final = 256 << 10
MAX_LOG_BYTES: Final = 4 << 20
_LAST_NUMBER: Final = 10**15 - 1
_REMOVE_S: Final = 120
PAGE_S: Final = 2 * ANSWER_S
"""Time for the process of a page to start and to answer."""
TRAINER_S: Final = 100.0
"""Time for the learner to check the files of weights."""


class FindRuns(Protocol):
    """Finder of the actor."""

    async def __call__(self) -> RunsApi:
        """Return the actor. Raises RunsMissing if there is none, and ActorLost if the cluster does not answer."""
        ...

    def forget(self) -> None:
        """Look the actor up again next time, because a call of it was lost."""
        ...


def make_app(find_runs: FindRuns, keys: KeyFile, secret: bytes) -> FastAPI:
    """Return the app, without pages of documentation, which would need no key. `secret`, which all replicas have, signs
    the cookies of browsers."""
    app = FastAPI(title="headrace", docs_url=None, redoc_url=None, openapi_url=None)
    api = ControlApi(find_runs, keys, secret)
    for method, path, handler in api.routes():
        app.add_api_route(path, handler, methods=[method], response_model=None)

    async def unknown_route(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return refused(status, "route_unknown", f"there is no {request.method} {request.url.path[:200]}")

    app.add_exception_handler(HTTPException, unknown_route)
    return app


def user_of(keys: KeyFile, digest: bytes) -> Caller | None:
    """Return the user of the key with this digest. Raises Refusal if the key file is refused now."""
    try:
        return keys.caller_of(digest)
    except ConfigError as error:
        logger.error("%s", error)
        raise Refusal(503, "keys_refused", "the API's key file is refused: the API's log has the reason") from error


class ControlApi:
    """All routes."""

    def __init__(self, find_runs: FindRuns, keys: KeyFile, secret: bytes) -> None:
        self._find_runs = find_runs
        self._keys = keys
        self._pages = RunPages(
            secret=secret,
            user_of=partial(user_of, keys),
            identify=self._caller,
            visible=self._visible,
            ask=lambda run_id, page: self._call(lambda runs: runs.page(run_id, page), timeout_s=PAGE_S),
        )

    def routes(self) -> list[tuple[str, str, Handler]]:
        run, allowed, on = "/v1/runs/{run}", self._allowed, self._on_run
        return [
            ("GET", "/healthz", self._healthz),
            ("GET", "/readyz", self._guarded(self._readyz)),
            ("POST", "/v1/runs", allowed(Role.OPERATE, self._submit)),
            ("GET", "/v1/runs", allowed(Role.READ, self._list)),
            ("GET", "/v1/metrics/targets", allowed(Role.READ, self._targets)),
            ("GET", run, on(Role.READ, self._show)),
            ("GET", f"{run}/status", on(Role.READ, self._status)),
            ("GET", f"{run}/report", on(Role.READ, self._report)),
            ("GET", f"{run}/events", on(Role.READ, self._events)),
            ("GET", f"{run}/page", self._guarded(self._pages.root)),
            ("GET", f"{run}/page/{{path:path}}", self._guarded(self._pages.view)),
            ("POST", f"{run}/page/login", self._guarded(self._pages.login)),
            ("GET", f"{run}/logs", on(Role.READ, self._logs, "actor", "after", "limit_bytes")),
            ("POST", f"{run}/drain", on(Role.OPERATE, self._wish(lambda runs, *of: runs.drain(*of)))),
            ("POST", f"{run}/stop", on(Role.OPERATE, self._wish(lambda runs, *of: runs.stop(*of)))),
            ("POST", f"{run}/resume", on(Role.OPERATE, self._resume)),
            ("POST", f"{run}/upgrade", on(Role.OPERATE, self._wish(lambda runs, *of: runs.upgrade(*of)))),
            ("GET", "/v1/nodes", allowed(Role.ADMIN, self._nodes)),
            ("POST", "/v1/nodes/{node}/drain", allowed(Role.ADMIN, self._drain_node)),
            ("GET", f"{run}/engines", on(Role.READ, self._engines)),
            ("POST", f"{run}/engines", on(Role.OPERATE, self._add_engine)),
            ("POST", f"{run}/take", on(Role.OPERATE, self._trainer(Take))),
            ("POST", f"{run}/commit", on(Role.OPERATE, self._trainer(Commit))),
            ("POST", f"{run}/release", on(Role.OPERATE, self._trainer(Release))),
            ("POST", f"{run}/weights", on(Role.OPERATE, self._trainer(Weights))),
            ("DELETE", f"{run}/engines/{{engine}}", on(Role.OPERATE, self._remove_engine, "timeout_s")),
        ]

    def _guarded(self, work: Callable[[Request], Awaitable[Response]]) -> Handler:
        """Return a handler that answers errors of `work`."""

        async def handler(request: Request) -> Response:
            try:
                return await work(request)
            except Exception as error:  # noqa: BLE001 - the one boundary
                return refusal_of(error)

        return handler

    def _allowed(self, role: Role, work: Work) -> Handler:
        """Return a handler for requests with a key of at least this role."""
        return self._guarded(lambda request: work(request, self._caller(request, role)))

    def _on_run(self, role: Role, work: RunWork, *query: str) -> Handler:
        """Return a handler for requests about a run that the caller may see."""

        async def handler(request: Request) -> Response:
            caller = self._caller(request, role)
            check_query(request, *query)
            return await work(request, await self._visible(run_id_of(request), caller), caller)

        return self._guarded(handler)

    def _caller(self, request: Request, role: Role) -> Caller:
        """Return the user of the request's key. Raises Refusal."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Refusal(401, "key_missing", "send the header `Authorization: Bearer KEY`")
        caller = user_of(self._keys, digest_of(key.strip()))
        if caller is None:
            raise Refusal(401, "key_wrong", "the key is unknown: ask the operator of this cluster for one")
        if caller.role < role:
            needed = role.name.lower()
            raise Refusal(403, "role_too_small", f"the key has the role {caller.role.name.lower()}: {needed} is needed")
        return caller

    async def _visible(self, run_id: RunId, caller: Caller) -> RunId:
        """Return the id of a run that the caller may see. Raises RunUnknown."""
        try:
            owner = (await self._call(lambda runs: runs.run(run_id))).owner
        except RunUnknown:
            owner = None
        if owner is None or not caller.sees(owner):
            # One text for both, or it would tell that another owner has such a run.
            raise unknown_run(run_id)
        return run_id

    async def _call(self, work: Callable[[RunsApi], Awaitable[T]], timeout_s: float = CALL_S) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await work(await self._find_runs())
        except (ActorLost, ActorGone):
            # The actor may have moved: a handle from before does not follow it.
            self._find_runs.forget()
            raise

    async def _healthz(self, request: Request) -> Response:
        return answer({"ok": True})

    async def _readyz(self, request: Request) -> Response:
        """Answer whether the service of runs answers, and with `?run=` whether that run gets on."""
        check_query(request, "run")
        if not (run := request.query_params.get("run", "")):
            await self._call(lambda runs: runs.runs(""))
            return answer({"ready": True})
        request.path_params["run"] = run
        run_id = await self._visible(run_id_of(request), self._caller(request, Role.READ))
        readiness = await self._call(lambda runs: runs.ready(run_id))
        return answer({"ready": readiness.is_ready, **asdict(readiness)}, 200 if readiness.is_ready else 503)

    async def _submit(self, request: Request, caller: Caller) -> Response:
        check_query(request)
        key = request.headers.get("idempotency-key", "")
        if not key:
            raise Refusal(400, "idempotency_key_missing", "send a header Idempotency-Key, such as a UUID, for each run")
        body = await read_body(request, SubmitBody)
        submission = Submission(name=body.name, owner=caller.owner, recipe=body.recipe, idempotency_key=key)
        record = await self._call(lambda runs: runs.submit(submission, caller))
        return answer(record, 201)

    async def _list(self, request: Request, caller: Caller) -> Response:
        check_query(request)
        return answer({"runs": await self._runs_of(caller)})

    async def _targets(self, request: Request, caller: Caller) -> Response:
        """Answer with the pages of the runs that have a service, as Prometheus' discovery over HTTP reads them."""
        check_query(request)
        below = request.url.path.removesuffix("/metrics/targets")
        labels = [
            {
                "instance": f"{run.name}-{run.run_id[:8]}",
                "__scheme__": request.url.scheme,
                "__metrics_path__": f"{below}/runs/{run.run_id}/page/metrics",
            }
            for run in await self._runs_of(caller)
            if run.is_live and run.actual is not ActualState.WAITING
        ]
        return answer([{"targets": [request.url.netloc], "labels": each} for each in labels])

    async def _runs_of(self, caller: Caller) -> tuple[RunRecord, ...]:
        """Return the runs that a caller may see."""
        owner = None if caller.role is Role.ADMIN else caller.owner
        return await self._call(lambda runs: runs.runs(owner))

    async def _show(self, request: Request, run_id: RunId, _: Caller) -> Response:
        return answer(await self._call(lambda runs: runs.run(run_id)))

    async def _status(self, request: Request, run_id: RunId, _: Caller) -> Response:
        return answer(await self._call(lambda runs: runs.status(run_id)))

    async def _report(self, request: Request, run_id: RunId, _: Caller) -> Response:
        return answer(await self._call(lambda runs: runs.report(run_id), timeout_s=60))

    def _wish(self, ask: Callable[[RunsApi, RunId, Caller], Awaitable[RunRecord]]) -> RunWork:
        """Return the work of a request that wants something else of a run."""

        async def work(request: Request, run_id: RunId, caller: Caller) -> Response:
            return answer(await self._call(lambda runs: ask(runs, run_id, caller)))

        return work

    async def _resume(self, request: Request, run_id: RunId, caller: Caller) -> Response:
        changes = tuple((await read_body(request, ResumeBody)).changes)
        return answer(await self._call(lambda runs: runs.resume(run_id, changes, caller)))

    async def _nodes(self, request: Request, caller: Caller) -> Response:
        check_query(request)
        return answer({"nodes": await self._call(lambda runs: runs.nodes())})

    async def _drain_node(self, request: Request, caller: Caller) -> Response:
        """Let the runs of all owners leave a node; the answer comes when they have."""
        check_query(request)
        node, deadline_s = request.path_params["node"], (await read_body(request, DrainNodeBody)).deadline_s
        limit_s = deadline_s + LEAVE_S + CALL_S
        return answer(await self._call(lambda runs: runs.drain_node(node, deadline_s, caller), timeout_s=limit_s))

    async def _events(self, request: Request, run_id: RunId, _: Caller) -> Response:
        last = request.headers.get("last-event-id", "")
        after = whole_number(last, "Last-Event-ID", 0, most=_LAST_NUMBER)

        async def next_page(after: int, timeout_s: float = POLL_S) -> EventPage:
            return await self._call(lambda runs: runs.events(run_id, after, timeout_s), timeout_s=timeout_s + CALL_S)

        first = await next_page(after, 0.0)
        if last and first.ended and not first.events:
            # Browsers reconnect after the end of a stream until they get this status.
            return Response(status_code=204)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(event_stream(first, after, next_page), media_type="text/event-stream", headers=headers)

    async def _logs(self, request: Request, run_id: RunId, _: Caller) -> Response:
        query = request.query_params
        limit = whole_number(query.get("limit_bytes", ""), "limit_bytes", LOG_BYTES, most=MAX_LOG_BYTES)
        actor, after = query.get("actor") or None, query.get("after", "")
        return answer(await self._call(lambda runs: runs.logs(run_id, actor, after, limit)))

    async def _engines(self, request: Request, run_id: RunId, _: Caller) -> Response:
        return answer({"engines": await self._call(lambda runs: runs.engines(run_id))})

    async def _add_engine(self, request: Request, run_id: RunId, caller: Caller) -> Response:
        body = await read_body(request, AddEngineBody)
        limit_s = body.timeout_s + CALL_S
        name = await self._call(
            lambda runs: runs.add_engine(run_id, body.url, body.timeout_s, caller), timeout_s=limit_s
        )
        return answer({"engine_id": name, "done": "add"})

    def _trainer(self, model: type[TrainerCall]) -> RunWork:
        """Return the work of a request of the user's trainer, with this body."""

        async def work(request: Request, run_id: RunId, caller: Caller) -> Response:
            body = await read_body(request, model)
            limit_s = (body.timeout_s if isinstance(body, Take) else TRAINER_S) + CALL_S
            document = await self._call(lambda runs: runs.trainer(run_id, body, caller), timeout_s=limit_s)
            return Response(document, media_type="application/json")

        return work

    async def _remove_engine(self, request: Request, run_id: RunId, caller: Caller) -> Response:
        timeout_s = float(whole_number(request.query_params.get("timeout_s", ""), "timeout_s", _REMOVE_S, most=600))
        engine = request.path_params["engine"]
        limit_s = timeout_s + CALL_S
        name = await self._call(lambda runs: runs.remove_engine(run_id, engine, timeout_s, caller), timeout_s=limit_s)
        return answer({"engine_id": name, "done": "remove"})
