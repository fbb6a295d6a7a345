"""Images of Harbor's task folders, built from their Dockerfiles in local sandboxes.

Invariants:
- An image has the name that `built_image` gives its folder, so that a task never boots one of other contents, and a
  folder whose image exists is not built again.
- A folder that cannot be built is reported with the reason; the others are built.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headrace.buffer.tasks.datasets.harbor import built_image
from headrace.sandboxes.errors import ImageUnknown, SandboxError
from headrace.sandboxes.images.build_context import store_files
from headrace.sandboxes.images.build_steps import BuildStep, Recipe, StepKind
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.images.catalog import ImageCatalog, StoredImage
from headrace.sandboxes.images.dockerfile import parse
from headrace.sandboxes.images.layers import UnpackLimits

_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImage:
    """The outcome for one folder. `problem` says why there is no image; a folder without a Dockerfile has neither."""

    folder: Path
    name: str = ""
    problem: str = ""
    was_there: bool = False
    seconds: float = 0.0


async def build_images(
    folders: Sequence[Path], bases: Mapping[str, str], builder: ImageBuilder
) -> AsyncIterator[FolderImage]:
    """Build the images of folders, some at a time, and yield the outcomes as they come. `bases` has our image for each
    name in FROM. Raises OSError for a folder that cannot be read."""
    await builder.prepare()
    places = asyncio.Semaphore(_AT_ONCE)

    async def build(folder: Path) -> FolderImage:
        async with places:
            began = time.monotonic()
            name = await asyncio.to_thread(built_image, folder)
            if name is None:
                return FolderImage(folder=folder)
            catalog = ImageCatalog(builder.files)
            if await asyncio.to_thread(catalog.find, name) is not None:
                return FolderImage(folder=folder, name=name, was_there=True)
            try:
                image = await _build(folder, name, bases, builder)
                await asyncio.to_thread(catalog.put, image)
            except SandboxError as error:
                return FolderImage(folder=folder, problem=error.message)
            return FolderImage(folder=folder, name=name, seconds=time.monotonic() - began)

    tasks = [asyncio.create_task(build(folder)) for folder in folders]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()


async def _build(folder: Path, name: str, bases: Mapping[str, str], builder: ImageBuilder) -> StoredImage:
    environment = folder / "environment"
    text = await asyncio.to_thread((environment / "Dockerfile").read_text, encoding="utf-8", errors="replace")
    parsed = parse(text)
    if parsed.base not in bases:
        raise ImageUnknown(f"FROM {parsed.base}: name an image for it with --base {parsed.base}=IMAGE")
    limits = UnpackLimits(builder.limits.layer_bytes, builder.limits.entries)
    steps = []
    for step in parsed.steps:
        context = ""
        if step.kind is StepKind.COPY:
            context = await asyncio.to_thread(store_files, builder.files, environment, step.arguments[0], limits)
        steps.append(BuildStep(kind=step.kind, arguments=step.arguments, context=context))
    built = await builder.build(Recipe(base=bases[parsed.base], steps=tuple(steps)))
    return replace(built, name=name, source=parsed.base, start_command=parsed.start_command)
