"""Builds of templates: their requests, uploaded files, states and logs.

Invariants:
- A name that the image map has cannot be taken.
- A template is in the table once a build of it has finished. A build that fails or that a restart interrupts leaves
  neither a template nor an image; what it has uploaded and its finished layers are only a cache.
- A running build counts as one of its owner's sandboxes. An owner has limited templates, bytes, waiting builds and log
  lines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.images.build_steps import E2B_USER, BuildRefused, BuildStep, Recipe, StepKind
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.images.catalog import ImageCatalog, StoredImage
from headrace.serve.sandbox_servers.e2b_state.bodies import timestamp
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, unsupported
from headrace.serve.sandbox_servers.e2b_state.images import DEFAULT_TEMPLATE, ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.lifecycle import IMAGE, Sandboxes
from headrace.serve.sandbox_servers.e2b_state.table import Template, TemplateBuild
from headrace.serve.sandbox_servers.e2b_state.template_bodies import (
    DEFAULT_TAG,
    NAME,
    NewTemplate,
    StartBuild,
    check_tags,
    split_name,
)
from headrace.serve.sandbox_servers.e2b_state.template_table import TemplateTable
from headrace.serve.sandbox_servers.e2b_state.uploads import Uploads

MAX_TEMPLATES: Final = 1000
"""Templates of one owner."""
MAX_BYTES: Final = 50 << 30
_MAX_BUILDS: Final = 100
"""Builds of one owner whose state is kept, running ones included."""
_MAX_LINES: Final = 5000
_MAX_LOG_CHARACTERS: Final = 1 << 19
"""Limits of the log of one build, whose oldest lines are dropped."""
_FOLDER: Final = "templates/"
_E2B_BASES: Final = ("e2bdev/base", "e2bdev/base:latest")
_REGISTRIES: Final = ("docker.io/library/", "docker.io/")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLogEntry:
    """A line of a build's log."""

    at: float
    level: str
    text: str
    step: str

    def to_json(self) -> dict[str, Any]:
        return {"timestamp": timestamp(self.at), "level": self.level, "message": self.text, "step": self.step}


@dataclass(slots=True, kw_only=True, eq=False)
class BuildJob:
    """A build whose state clients can ask for. `status` is `waiting`, `building`, `ready` or `error`."""

    id: str
    template_id: str
    owner: Owner
    name: str
    tags: list[str]
    order: NewTemplate
    created_at: float
    status: str = "waiting"
    reason: str = ""
    failed_step: str = ""
    dropped: int = 0
    """Number of lines that are no longer in `lines`."""
    lines: deque[BuildLogEntry] = field(default_factory=deque)
    characters: int = 0
    task: asyncio.Task[None] | None = None

    def log(self, level: str, text: str, step: str) -> None:
        self.lines.append(BuildLogEntry(at=time.time(), level=level, text=text, step=step))
        self.characters += len(text)
        while len(self.lines) > _MAX_LINES or self.characters > _MAX_LOG_CHARACTERS:
            self.characters -= len(self.lines.popleft().text)
            self.dropped += 1

    def lines_from(self, offset: int, limit: int, level: str = "") -> list[BuildLogEntry]:
        """Return at most `limit` lines from the line `offset` on; of a level, or of any."""
        found = list(self.lines)[max(0, offset - self.dropped) :]
        ranks = ("debug", "info", "warn", "error")
        if level in ranks:
            found = [line for line in found if ranks.index(line.level) >= ranks.index(level)]
        return found[:limit]


class Templates:
    """The templates of one server, finished ones in `table`, and their builds."""

    def __init__(
        self, sandboxes: Sandboxes, builder: ImageBuilder, images: ImageMap, max_bytes: int = MAX_BYTES
    ) -> None:
        """`max_bytes` is the limit of the images of one owner's templates, each with all its layers."""
        self._max_bytes = max_bytes
        self._sandboxes = sandboxes
        self._builder = builder
        self._images = images
        self.table = TemplateTable(sandboxes.tables, ImageCatalog(builder.files))
        self.uploads = Uploads(builder)
        self._builds: dict[str, BuildJob] = {}
        sandboxes.built = self.table

    def get_build(self, owner: Owner, template_id: str, build_id: str) -> BuildJob:
        """Return a build whose state is known. Raises ApiError 404."""
        build = self._builds.get(build_id)
        if build is not None and build.owner.name == owner.name and template_id in (build.template_id, build.name):
            return build
        template = self.table.find(owner.name, template_id)
        done = next((one for one in template.builds if one.id == build_id), None) if template is not None else None
        if template is None or done is None:
            raise ApiError(404, f"build {build_id[:100]!r} of template {template_id[:200]!r} not found")
        return BuildJob(
            id=done.id,
            template_id=template.id,
            owner=owner,
            name=template.name,
            tags=[],
            order=NewTemplate(name=template.name),
            created_at=done.created_at,
            status="ready",
        )

    def request(self, owner: Owner, order: NewTemplate) -> BuildJob:
        """Make a build that waits for its files and its start. Raises ApiError."""
        name, tag = split_name(order.name or order.alias)
        tags = check_tags([*([tag] if tag else []), *order.tags]) or [DEFAULT_TAG]
        if self._images.find(name) is not None or name.startswith(_FOLDER):
            raise ApiError(400, f"template name {name!r}: is an image of this server; choose another name")
        template = self.table.find(owner.name, name)
        if template is None and len(self.table.of(owner)) >= MAX_TEMPLATES:
            raise ApiError(429, f"key {owner.name!r} has {MAX_TEMPLATES} templates, the most: delete some")
        own = [one for one in self._builds.values() if one.owner.name == owner.name]
        for oldest in own[: max(0, len(own) + 1 - _MAX_BUILDS)]:
            if oldest.status == "building":
                raise ApiError(429, f"key {owner.name!r} has {len(own)} builds, the most", retry_after_s=5.0)
            del self._builds[oldest.id]
        waiting = next((one for one in own if one.name == name and one.status != "error"), None)
        known_id = template.id if template is not None else waiting.template_id if waiting is not None else None
        build = BuildJob(
            id=str(uuid.uuid4()),
            template_id=known_id or f"t{secrets.token_hex(10)}",
            owner=owner,
            name=name,
            tags=tags,
            order=order,
            created_at=time.time(),
        )
        self._builds[build.id] = build
        return build

    def may_upload(self, owner: Owner, template_id: str) -> None:
        """Check that an owner has a template or a waiting build with this id. Raises ApiError 404."""
        own = (one.template_id for one in self._builds.values() if one.owner.name == owner.name)
        if template_id not in own and self.table.find(owner.name, template_id) is None:
            raise ApiError(404, f"template {template_id[:200]!r} not found")

    async def start(self, owner: Owner, build: BuildJob, order: StartBuild) -> None:
        """Start a waiting build. Raises ApiError; a build that cannot start is forgotten."""
        if build.status != "waiting":
            raise ApiError(409, f"build {build.id!r} has been started already")
        try:
            recipe = await self.recipe(owner, order)
            self._sandboxes.check_quota(owner)
        except BaseException:
            self._builds.pop(build.id, None)
            raise
        build.status = "building"
        self._sandboxes.builds[owner.name] += 1
        build.task = self._sandboxes.tasks.start(self._run(build, recipe))

    async def recipe(self, owner: Owner, order: StartBuild) -> Recipe:
        """Return what to build. Raises ApiError."""
        if order.from_image_registry:
            raise unsupported("fromImageRegistry (images come from this server's image map and catalogue)")
        if bool(order.from_image) == bool(order.from_template):
            raise ApiError(400, "name exactly one of fromImage and fromTemplate")
        base = await self._base(owner, order.from_image or "", order.from_template or "")
        steps = []
        for step in order.steps:
            context = await self.uploads.find(owner, step.files_hash or "") if step.kind is StepKind.COPY else ""
            steps.append(BuildStep(kind=step.kind, arguments=tuple(step.args), context=context, force=step.force))
        used = sum(build.size_bytes for template in self.table.of(owner) for build in template.builds)
        return Recipe(
            base=base,
            source=order.from_image or order.from_template or "",
            steps=tuple(steps),
            default_user=E2B_USER if steps else "",
            start_command=order.start_cmd or "",
            ready_command=order.ready_cmd or "",
            force=order.force,
            max_bytes=self._max_bytes - used,
        )

    async def _base(self, owner: Owner, image: str, template: str) -> str:
        """Return the reference of a base. Raises ApiError 400."""
        if template:
            if (found := self._images.find(template)) is not None:
                return found
            build = self.table.find_build(owner.name, template)
            if build is None:
                raise ApiError(400, f"fromTemplate: there is no template {template[:200]!r} of this key")
            return f"{IMAGE}{build.image}"
        if image in _E2B_BASES:
            image = DEFAULT_TEMPLATE
        names = [image, *(image.removeprefix(registry) for registry in _REGISTRIES if image.startswith(registry))]
        for name in names:
            if (found := self._images.find(name)) is not None:
                return found
            is_own = NAME.fullmatch(name) is not None and "/" not in name
            if is_own and await asyncio.to_thread(self.table.catalog.find, name) is not None:
                return f"{IMAGE}{name}"
        if (build := self.table.find_build(owner.name, image)) is not None:
            return f"{IMAGE}{build.image}"
        known = ", ".join(self._images.names()[:20])
        raise ApiError(400, f"FROM {image[:200]}: this server has no such image (it downloads none); it has: {known}")

    async def _run(self, build: BuildJob, recipe: Recipe) -> None:
        owner = build.owner
        try:
            built = await self._builder.build(
                recipe, log=build.log, may_boot=lambda: self._sandboxes.check_quota(owner, own_build=True)
            )
            await self.keep(build, recipe, built)
        except (SandboxError, ApiError) as error:
            self._fail(build, error.message, error.step if isinstance(error, BuildRefused) else "")
        except asyncio.CancelledError:
            self._fail(build, "the build was ended: its template was deleted, or the server shut down", "")
            raise
        except Exception:
            logger.exception("build %s failed", build.id)
            self._fail(build, "internal error of the server", "")
        finally:
            self._sandboxes.builds[owner.name] -= 1

    def _fail(self, build: BuildJob, message: str, step: str) -> None:
        build.log("error", message[:4000], step)
        build.reason, build.failed_step, build.status = message[:4000], step, "error"

    async def keep(self, build: BuildJob, recipe: Recipe, built: StoredImage) -> None:
        """Give a finished image its name and its template, or neither. Raises ApiError, SandboxError."""
        name = f"{_FOLDER}{build.template_id}/{build.id}"
        putting = asyncio.ensure_future(asyncio.to_thread(self.table.catalog.put, replace(built, name=name)))
        try:
            await asyncio.shield(putting)
            await self._enter(build, recipe, built, name)
        except asyncio.CancelledError:
            # The template is being deleted, and a thread cannot be cancelled.
            await asyncio.wait([putting])
            await asyncio.to_thread(self.table.catalog.remove, name)
            raise

    async def _enter(self, build: BuildJob, recipe: Recipe, built: StoredImage, name: str) -> None:
        """Add a build to its template."""
        now = time.time()
        done = TemplateBuild(
            id=build.id,
            image=name,
            size_bytes=built.size_bytes,
            created_at=build.created_at,
            finished_at=now,
            user=built.user,
            folder=built.folder,
            start_command=recipe.start_command,
            ready_command=recipe.ready_command,
        )
        known = self.table.find(build.owner.name, build.template_id) or self.table.find(build.owner.name, build.name)
        template = known or Template(
            id=build.template_id,
            owner=build.owner.name,
            name=build.name,
            builds=(),
            tags={},
            tagged_at={},
            created_at=build.created_at,
            updated_at=now,
        )
        template = replace(
            template,
            builds=(*template.builds, done),
            cpu_count=build.order.cpu_count,
            memory_mb=build.order.memory_mb,
            updated_at=now,
        )
        await self.table.add_tags(template, build.id, build.tags)
        build.log("info", f"built {built.made_layers} layers, {built.cached_layers} from the cache", "finalize")
        build.status = "ready"

    async def delete(self, owner: Owner, name: str) -> bool:
        """Delete a template with its images, by its id or name; its builds are ended. Sandboxes of it live on. Returns
        False if the owner has neither a template nor a build of that name."""
        template = self.table.find(owner.name, name)
        names = {name} if template is None else {template.id}
        builds = [
            build
            for build in self._builds.values()
            if build.owner.name == owner.name and names & {build.template_id, build.name}
        ]
        for build in builds:
            if build.task is not None and not build.task.done():
                build.task.cancel()
                await asyncio.wait((build.task,))
            self._builds.pop(build.id, None)
        template = self.table.find(owner.name, name)
        if template is not None:
            await self.table.drop(template)
        return template is not None or bool(builds)
