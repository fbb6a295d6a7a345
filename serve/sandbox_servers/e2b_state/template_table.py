"""The finished templates of a server: look-up, tags, images.

Invariants:
- A template belongs to one owner, and nobody else finds it, by id or by name.
- A template has at least one finished build, and each build at least one tag. An image that no tag names any more is
  removed, with the build.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from headrace.sandboxes.images.catalog import ImageCatalog
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.table import SandboxTables, Template, TemplateBuild
from headrace.serve.sandbox_servers.e2b_state.template_bodies import DEFAULT_TAG, check_tags, split_name


class TemplateTable:
    """Templates in memory and in the server's table, and their images in the catalogue."""

    def __init__(self, tables: SandboxTables, catalog: ImageCatalog) -> None:
        self._table = tables.templates
        self.catalog = catalog
        self._templates = {one.id: one for one in self._table.all()}

    def find(self, owner: str, name: str) -> Template | None:
        """Return one of an owner's templates by its id or name."""
        found = self._templates.get(name)
        if found is None:
            found = next((one for one in self._templates.values() if one.owner == owner and one.name == name), None)
        return found if found is not None and found.owner == owner else None

    def get(self, owner: Owner, name: str) -> Template:
        """Return one of an owner's templates. Raises ApiError 404."""
        found = self.find(owner.name, name)
        if found is None:
            raise ApiError(404, f"template {name[:200]!r} not found")
        return found

    def of(self, owner: Owner) -> list[Template]:
        """Return an owner's templates, newest first."""
        found = [one for one in self._templates.values() if one.owner == owner.name]
        return sorted(found, key=lambda one: (-one.created_at, one.id))

    def find_build(self, owner: str, name: str) -> TemplateBuild | None:
        """Return the build that `name[:tag]` or an id names, and count its use."""
        name, _, tag = name.partition(":")
        template = self.find(owner, name)
        if template is None or (build_id := template.tags.get(tag or DEFAULT_TAG)) is None:
            return None
        used = replace(template, spawn_count=template.spawn_count + 1, last_spawned_at=time.time())
        self._put(used)
        return next((build for build in template.builds if build.id == build_id), None)

    async def tag(self, owner: Owner, target: str, tags: list[str]) -> TemplateBuild:
        """Give tags to the build that `name[:tag]` names. Raises ApiError."""
        name, tag = split_name(target)
        template = self.get(owner, name)
        build_id = template.tags.get(tag or DEFAULT_TAG)
        if build_id is None:
            raise ApiError(404, f"template {name!r} has no tag {tag or DEFAULT_TAG!r}")
        await self.add_tags(template, build_id, check_tags(tags))
        return next(build for build in template.builds if build.id == build_id)

    async def untag(self, owner: Owner, name: str, tags: list[str]) -> None:
        """Remove tags, and the builds that have none left; the last tag of a template cannot be removed. Raises
        ApiError."""
        template = self.get(owner, name)
        left = {tag: build for tag, build in template.tags.items() if tag not in tags}
        if missing := [tag for tag in tags if tag not in template.tags]:
            raise ApiError(404, f"template {name!r} has no tag {missing[0]!r}")
        if not left:
            raise ApiError(400, f"template {name!r} would have no tag: delete the template instead")
        await self._set_tags(template, left)

    async def add_tags(self, template: Template, build_id: str, tags: list[str]) -> None:
        """Store a template with tags for one of its builds."""
        now = time.time()
        template = replace(template, tagged_at={**template.tagged_at, **dict.fromkeys(tags, now)})
        await self._set_tags(template, {**template.tags, **dict.fromkeys(tags, build_id)})

    async def _set_tags(self, template: Template, tags: dict[str, str]) -> None:
        kept = tuple(build for build in template.builds if build.id in tags.values())
        gone = [build for build in template.builds if build not in kept]
        self._put(replace(template, builds=kept, tags=tags, updated_at=time.time()))
        await self._remove_images(gone)

    def _put(self, template: Template) -> None:
        self._templates[template.id] = template
        self._table.put(template)

    async def drop(self, template: Template) -> None:
        """Delete a template with its images. Sandboxes of it live on."""
        self._templates.pop(template.id, None)
        self._table.drop(template.id)
        await self._remove_images(template.builds)

    async def _remove_images(self, builds: tuple[TemplateBuild, ...] | list[TemplateBuild]) -> None:
        for build in builds:
            await asyncio.to_thread(self.catalog.remove, build.image)
