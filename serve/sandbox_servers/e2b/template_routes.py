"""Routes of templates: names, builds, uploads and tags.

Invariant: every route but the upload requires a key, and shows and changes only the templates of its owner.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from headrace.sandboxes.errors import SandboxError
from headrace.serve.sandbox_servers.e2b.control import ENVD_VERSION
from headrace.serve.sandbox_servers.e2b.envd import Authentication
from headrace.serve.sandbox_servers.e2b.observation import ObservationRoutes
from headrace.serve.sandbox_servers.e2b_state.bodies import read_body, timestamp
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, api_error
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.table import Template
from headrace.serve.sandbox_servers.e2b_state.template_bodies import (
    AssignTags,
    NewTemplate,
    RemoveTags,
    StartBuild,
    check_tags,
    split_name,
)
from headrace.serve.sandbox_servers.e2b_state.templates import BuildJob, Templates

_CHUNK_BYTES: Final = 1 << 18
_MAX_LINES: Final = 100
"""Lines of a build's log in one response."""


class TemplateRoutes:
    """Handlers for the routes."""

    def __init__(self, templates: Templates, observation: ObservationRoutes) -> None:
        self._templates = templates
        self._observation = observation

    def routes(self, access: Authentication) -> list[web.RouteDef]:
        owned, one, build = access.owned, "/templates/{id}", "/templates/{id}/builds/{build}"
        return [
            web.put("/templates/uploads/{secret}", self.upload),
            web.get("/templates/aliases/{alias:.+}", owned(self.alias)),
            web.post("/templates/tags", owned(self.assign_tags)),
            web.delete("/templates/tags", owned(self.remove_tags)),
            web.post("/v3/templates", owned(self.request)),
            web.get("/templates", owned(self.list_all)),
            web.get("/v2/templates", owned(self.list_all)),
            web.get(one, owned(self.get_one)),
            web.delete(one, owned(self.delete)),
            web.get(f"{one}/tags", owned(self.tags)),
            web.get(f"{one}/files/{{hash}}", owned(self.offer_upload)),
            web.post(f"/v2{build}", owned(self.start)),
            web.get(f"{build}/status", owned(self.status)),
            web.get(f"{build}/logs", owned(self.logs)),
        ]

    async def alias(self, request: web.Request, owner: Owner) -> web.Response:
        """Answer whether the owner has a template of this name."""
        name, tag = split_name(request.match_info["alias"])
        template = self._templates.table.get(owner, name)
        if tag and tag not in template.tags:
            raise ApiError(404, f"template {name!r} has no tag {tag!r}")
        return web.json_response({"templateID": template.id, "public": False})

    async def request(self, request: web.Request, owner: Owner) -> web.Response:
        """Make a build that waits for its files."""
        build = self._templates.request(owner, await read_body(request, NewTemplate))
        document = {
            "templateID": build.template_id,
            "buildID": build.id,
            "public": False,
            "names": [build.name],
            "aliases": [build.name],
            "tags": build.tags,
        }
        return web.json_response(document, status=202)

    async def offer_upload(self, request: web.Request, owner: Owner) -> web.Response:
        """Offer an upload URL for files."""
        self._templates.may_upload(owner, request.match_info["id"])
        uploads, files_hash = self._templates.uploads, request.match_info["hash"]
        present = await uploads.find(owner, files_hash) != ""
        # A URL comes with files that are present too: clients may upload them again.
        # The scheme that the client used, if a proxy says so.
        scheme = request.headers.get("X-Forwarded-Proto", request.scheme)
        scheme = scheme if scheme in ("http", "https") else request.scheme
        url = f"{scheme}://{request.host}/templates/uploads/{uploads.offer(owner, files_hash)}"
        return web.json_response({"present": present, "url": url}, status=201)

    async def upload(self, request: web.Request) -> web.Response:
        """Store uploaded files; the URL's secret is the authorisation."""
        try:
            chunks = request.content.iter_chunked(_CHUNK_BYTES)
            await self._templates.uploads.receive(request.match_info["secret"], chunks)
        except ApiError as error:
            return error.response()
        except SandboxError as error:
            return api_error(error).response()
        return web.Response(status=200)

    async def start(self, request: web.Request, owner: Owner) -> web.Response:
        """Start a waiting build."""
        build = self._build(request, owner)
        await self._templates.start(owner, build, await read_body(request, StartBuild))
        return web.Response(status=202)

    def _build(self, request: web.Request, owner: Owner) -> BuildJob:
        return self._templates.get_build(owner, request.match_info["id"], request.match_info["build"])

    async def status(self, request: web.Request, owner: Owner) -> web.Response:
        """Answer with a build's state and a part of its log."""
        build = self._build(request, owner)
        offset, limit = _number(request, "logsOffset", 0), _number(request, "limit", _MAX_LINES)
        lines = [line.to_json() for line in build.lines_from(offset, limit, request.query.get("level", ""))]
        document: dict[str, Any] = {
            "templateID": build.template_id,
            "buildID": build.id,
            "status": build.status,
            "logs": [],
            "logEntries": lines,
        }
        if build.status == "error":
            step = {"step": build.failed_step} if build.failed_step else {}
            document["reason"] = {"message": build.reason, "logEntries": [], **step}
        return web.json_response(document)

    async def logs(self, request: web.Request, owner: Owner) -> web.Response:
        """Answer with a build's log."""
        build = self._build(request, owner)
        lines = build.lines_from(0, len(build.lines), request.query.get("level", ""))
        cursor = _number(request, "cursor", 0) / 1000
        backward = request.query.get("direction", "forward") == "backward"
        if backward:
            lines = [line for line in lines[::-1] if not cursor or line.at <= cursor]
        else:
            lines = [line for line in lines if line.at >= cursor]
        return web.json_response({"logs": [line.to_json() for line in lines[: _number(request, "limit", _MAX_LINES)]]})

    async def list_all(self, request: web.Request, owner: Owner) -> web.Response:
        """List the owner's templates."""
        return web.json_response([_shown(template) for template in self._templates.table.of(owner)])

    async def get_one(self, request: web.Request, owner: Owner) -> web.Response:
        """Answer with a template and its builds."""
        template = self._templates.table.get(owner, request.match_info["id"])
        builds = [
            {
                "buildID": build.id,
                "status": "ready",
                "createdAt": timestamp(build.created_at),
                "updatedAt": timestamp(build.finished_at),
                "finishedAt": timestamp(build.finished_at),
                "cpuCount": template.cpu_count,
                "memoryMB": template.memory_mb,
                "diskSizeMB": 0,
                "envdVersion": ENVD_VERSION,
            }
            for build in template.builds[::-1]
        ]
        return web.json_response({**_shown(template), "builds": builds})

    async def delete(self, request: web.Request, owner: Owner) -> web.Response:
        """Delete a template, or a snapshot of that id."""
        if not await self._templates.delete(owner, request.match_info["id"]):
            return await self._observation.delete_snapshot(request, owner)
        return web.Response(status=204)

    async def assign_tags(self, request: web.Request, owner: Owner) -> web.Response:
        """Give tags to a build."""
        body = await read_body(request, AssignTags)
        build = await self._templates.table.tag(owner, body.target, body.tags)
        return web.json_response({"buildID": build.id, "tags": check_tags(body.tags)}, status=201)

    async def remove_tags(self, request: web.Request, owner: Owner) -> web.Response:
        """Remove tags of a template."""
        body = await read_body(request, RemoveTags)
        await self._templates.table.untag(owner, body.name, body.tags)
        return web.Response(status=204)

    async def tags(self, request: web.Request, owner: Owner) -> web.Response:
        """List the tags of a template."""
        template = self._templates.table.get(owner, request.match_info["id"])
        rows = [
            {"tag": tag, "buildID": build_id, "createdAt": timestamp(template.tagged_at.get(tag, template.updated_at))}
            for tag, build_id in template.tags.items()
        ]
        return web.json_response(rows)


def _shown(template: Template) -> dict[str, Any]:
    last = template.builds[-1]
    spawned = None if template.last_spawned_at is None else timestamp(template.last_spawned_at)
    return {
        "templateID": template.id,
        "buildID": last.id,
        "cpuCount": template.cpu_count,
        "memoryMB": template.memory_mb,
        "diskSizeMB": 0,
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": timestamp(template.created_at),
        "updatedAt": timestamp(template.updated_at),
        "createdBy": None,
        "lastSpawnedAt": spawned,
        "spawnCount": template.spawn_count,
        "buildCount": len(template.builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    }


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ApiError(400, f"{name}: {text[:20]!r} is not a number")
    return int(text)
