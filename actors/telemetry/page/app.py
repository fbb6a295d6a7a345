"""The web application that shows a run: one page for each view, their data, and one stream of changes.

Invariants:
- Only files of the run are read; no request changes anything but the cookie of who logs in.
- Every link is relative, so the application works under any prefix.
- At most `MAX_STREAMS` streams are open; a client that reads nothing for `WRITE_S` is disconnected.
- An error that a user can meet is one clear line, on a page or as plain text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from markupsafe import Markup

from headrace.actors.errors import RunError
from headrace.actors.runtime.actors.event_stream import event_stream
from headrace.actors.telemetry.page import views
from headrace.actors.telemetry.page.access import HTML, NEEDED, Access, PageAnswer, add_headers
from headrace.actors.telemetry.page.changes import Changes, ChangeWatch
from headrace.actors.telemetry.page.computed import Busy
from headrace.actors.telemetry.page.reader import RunReader
from headrace.actors.telemetry.page.rendering import make_environment
from headrace.actors.telemetry.page.rollout_reading import RolloutUnknown
from headrace.actors.telemetry.page.slow_verdicts import Explained
from headrace.actors.telemetry.slow.timeline_html import timeline_fragment
from headrace.actors.telemetry.slow.waterfall_html import waterfall_fragment
from headrace.buffer.errors import ReplayError

MAX_STREAMS: Final = 32
WRITE_S: Final = 20.0
MAX_BODY_BYTES: Final = 64 << 10
MAX_DIGITS: Final = 16
"""Digits of a number of a change."""
OPEN: Final = frozenset({"static", "login"})
"""Names of the routes that need no token: they say nothing about the run."""
RUNNING_ROWS: Final = 200
COMPUTING: Final = "Verdicts are being computed, which takes a while on a large run. Load the page again soon."


def build_app(run_dir: Path, token: str, *, hosts: Iterable[str] = ()) -> web.Application:
    """Return the application that shows the run in `run_dir` to requests with `token`. `hosts` are names, beside
    `localhost` and addresses, under which it is reached. Routes that are added to it need the token, too. Raises
    RunMissing for a folder that is no run."""
    pages = Pages(RunReader(run_dir), Access(token, frozenset(host.lower() for host in hosts)))
    app = web.Application(
        middlewares=[pages.access.middleware(pages.refuse, OPEN), pages.errors], client_max_size=MAX_BODY_BYTES
    )
    app.add_routes(pages.routes())
    app.on_response_prepare.append(add_headers)
    app.on_shutdown.append(pages.end_streams)
    app.on_cleanup.append(pages.close)
    return app


class Pages:
    """All handlers of the page of one run."""

    def __init__(self, reader: RunReader, access: Access) -> None:
        self.access = access
        self._reader = reader
        self._templates = make_environment()
        self._changes = ChangeWatch(reader.mark)
        self._streams = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._overview),
            web.get("/running", self._running),
            web.get("/slow", self._slow),
            web.get("/rollout", self._rollout),
            web.get("/rollout.json", self._rollout_data),
            web.get("/steps", self._steps),
            web.get("/engines", self._engines),
            web.get("/pushes", self._pushes),
            web.get("/data/{series}.json", self._data),
            web.get("/events", self._events, allow_head=False),
            web.get("/static/{file}", self._file, name="static"),
            web.post("/login", self._login, name="login"),
        ]

    async def end_streams(self, _: web.Application) -> None:
        self._changes.close()

    async def close(self, _: web.Application) -> None:
        self._reader.close()

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        """Answer a request without the token: with the form for a browser, else with one line."""
        if _wants_html(request) and request.method in ("GET", "HEAD"):
            return _response(self.access.door.form(str(request.rel_url)))
        headers = {"WWW-Authenticate": "Bearer"}
        return web.Response(text=f"{NEEDED}\n", status=HTTPStatus.UNAUTHORIZED, headers=headers)

    @property
    def errors(self) -> Middleware:
        """The middleware that answers errors."""

        @web.middleware
        async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except RolloutUnknown as error:
                return await self._problem(request, HTTPStatus.NOT_FOUND, str(error))
            except Busy:
                return await self._problem(
                    request, HTTPStatus.SERVICE_UNAVAILABLE, "too many rollouts are being read: try again in a second"
                )
            except (RunError, ReplayError, OSError) as error:
                return await self._problem(request, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            except web.HTTPException as error:
                if error.status < HTTPStatus.BAD_REQUEST:
                    raise
                text = f"{error.reason.lower()}: the page has no {request.path[:200]}"
                return await self._problem(request, HTTPStatus(error.status), text)

        return answered

    async def _overview(self, request: web.Request) -> web.Response:
        async with asyncio.TaskGroup() as tasks:
            explaining, counting = tasks.create_task(self._found()), tasks.create_task(self._in_flight())
        verdicts, running = explaining.result(), counting.result()
        shown = views.overview(await self._reader.metrics(), verdicts["found"])
        engines = (await self._reader.roster()).engines
        return await self._page("overview.html", running=running, engines=engines, **verdicts, **shown)

    async def _running(self, request: web.Request) -> web.Response:
        rows = await self._reader.running()
        return await self._page("running.html", rows=rows[:RUNNING_ROWS], total=len(rows))

    async def _slow(self, request: web.Request) -> web.Response:
        explained = await self._found()
        found: Explained | None = explained["found"]
        step, part = _whole(request, "step"), request.query.get("part", "")[:200]
        verdicts = [] if found is None else views.chosen(found.report.verdicts, step=step, part=part)
        page = views.cut(verdicts, _whole(request, "page") or 1)
        rows = views.verdict_rows(page.rows)
        parts = sorted({cause for one in (found.report.verdicts if found else ()) for cause in one.causes})
        chosen: dict[str, Any] = {"page": page, "rows": rows, "step": step, "part": part, "parts": parts}
        return await self._page("slow.html", **explained, **chosen)

    async def _rollout(self, request: web.Request) -> web.Response:
        details = await self._reader.rollout(request.query.get("id", "")[:1000])
        times = await self._reader.times(details.rollout_id)
        found: Explained | None = (await self._found())["found"]
        verdicts = () if found is None else found.report.verdicts
        verdict = next((verdict for verdict in verdicts if verdict.rollout_id == details.rollout_id), None)
        # The fragments are markup that escapes what agents wrote.
        pair = None if times is None else times.value
        drawn = None if pair is None else Markup(waterfall_fragment(*pair, verdict))
        timeline = Markup(timeline_fragment(details.timelines))
        pending = times is None
        return await self._page("rollout.html", details=details, timeline=timeline, waterfall=drawn, pending=pending)

    async def _rollout_data(self, request: web.Request) -> web.Response:
        details = await self._reader.rollout(request.query.get("id", "")[:1000])
        attempts = [each.to_json() for each in details.timelines]
        document = orjson.dumps({"rollout_id": details.rollout_id, "attempts": attempts})
        return web.Response(body=document, content_type="application/json")

    async def _steps(self, request: web.Request) -> web.Response:
        records = await self._reader.metrics()
        page = views.cut(views.step_rows(records), _whole(request, "page") or 1)
        return await self._page("steps.html", page=page, left_out=records.left_out.get("step", 0))

    async def _engines(self, request: web.Request) -> web.Response:
        return await self._page("engines.html", roster=await self._reader.roster())

    async def _pushes(self, request: web.Request) -> web.Response:
        records = await self._reader.metrics()
        page = views.cut(views.push_rows(records), _whole(request, "page") or 1)
        return await self._page("pushes.html", page=page, left_out=records.left_out.get("push", 0))

    async def _data(self, request: web.Request) -> web.Response:
        if (series := views.SERIES.get(request.match_info["series"])) is None:
            raise web.HTTPNotFound
        document = series(await self._reader.metrics())
        return web.Response(body=orjson.dumps(document), content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages follow this run already: close one, or load the page again to update it\n"
            return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text=text, headers={"Retry-After": "10"})

        def is_gone() -> bool:
            # Nothing else tells of a client that has left before the next write.
            return request.transport is None or request.transport.is_closing()

        async def next_page(after: int) -> Changes:
            return await self._changes.after(after, is_gone)

        self._streams += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        try:
            given = request.headers.get("Last-Event-ID", "")
            is_number = given.isascii() and given.isdigit() and len(given) < MAX_DIGITS
            after = int(given) if is_number else await self._changes.number()
            await response.prepare(request)
            # A client whose connection is cut before the first event comes again with this number.
            await response.write(b"id: %d\n\n" % after)
            async for block in event_stream(Changes((), ended=False), after, next_page, name="changed"):
                async with asyncio.timeout(WRITE_S):
                    await response.write(block)
        except (TimeoutError, ConnectionError):
            # The client is gone, or reads nothing: it comes again with the last number that it saw.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return response

    async def _file(self, request: web.Request) -> web.Response:
        found = self.access.door.file(request.match_info["file"], request.headers.get("If-None-Match"))
        if found is None:
            raise web.HTTPNotFound
        return _response(found)

    async def _login(self, request: web.Request) -> web.Response:
        fields, host = await request.post(), request.headers.get("Host", "")
        return _response(self.access.door.enter(fields, request.path, host, secure=request.secure))

    async def _found(self) -> dict[str, Any]:
        """Return the verdicts as far as they are known, why there are none, and whether they are being computed."""
        try:
            reading = await self._reader.explained()
        except (RunError, ReplayError, OSError) as error:
            return {"found": None, "note": str(error), "pending": False}
        if reading is None:
            return {"found": None, "note": COMPUTING, "pending": True}
        return {"found": reading.value, "note": "", "pending": False}

    async def _in_flight(self) -> int | None:
        try:
            rows = await self._reader.running_soon()
            return None if rows is None else len(rows)
        except (RunError, ReplayError, OSError):
            return None

    async def _page(self, template: str, *, status: HTTPStatus = HTTPStatus.OK, **context: Any) -> web.Response:
        summary = await self._reader.summary()
        context |= {"summary": summary, "view": template.removesuffix(".html")}
        text = await self._reader.in_thread(lambda: self._templates.get_template(template).render(context))
        # A lone surrogate may be a part of any file's text.
        body = text.encode(errors="replace")
        return web.Response(body=body, headers={"Content-Type": HTML}, status=status)

    async def _problem(self, request: web.Request, status: HTTPStatus, text: str) -> web.Response:
        # Who asks for a file or the form may have no token, and a whole page names the run.
        if not _wants_html(request) or request.match_info.route.name in OPEN:
            return web.Response(status=status, body=f"{text}\n".encode(errors="replace"), content_type="text/plain")
        return await self._page("problem.html", status=status, problem=text, code=int(status))


def _response(answer: PageAnswer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def _wants_html(request: web.Request) -> bool:
    return "text/html" in request.headers.get("Accept", "")


def _whole(request: web.Request, key: str) -> int | None:
    """Return a whole number of the query; None for anything else."""
    given = request.query.get(key, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 10 else None
