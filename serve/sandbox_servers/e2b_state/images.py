"""Mapping from a create request's template name, or from a metadata key, to an image.

Invariants: a client can select only names in the map; an image reference never comes from a client.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from headrace.sandboxes.errors import CapacityExceeded, ImageUnknown, SandboxError, SpecRefused
from headrace.sandboxes.images.catalog import NAME, NAMED, ImageCatalog, StoredImage
from headrace.sandboxes.images.store import ImageStore, check_reference
from headrace.sandboxes.local.images import SNAPSHOT
from headrace.sandboxes.local.provider import LocalProvider

DEFAULT_TEMPLATE: Final = "base"
HOST: Final = "host"


class ImageMap:
    """Image references by name. `base` is `host` unless the map contains it. `find_named` looks a
    name up in the catalogue of the image store; those with a slash are not for clients."""

    def __init__(
        self,
        images: Mapping[str, str] | None = None,
        metadata_key: str = "",
        find_named: Callable[[str], StoredImage | None] = lambda _name: None,
    ) -> None:
        self._images = {DEFAULT_TEMPLATE: HOST, **(images or {})}
        self._find_named = find_named
        self._keys = (metadata_key, f"{metadata_key}/image") if metadata_key else ()

    def names(self) -> list[str]:
        """Return the names that clients can use."""
        return sorted(self._images)

    def commands_of(self, image: str) -> tuple[str, str]:
        """Return the start command and the ready command of an image, which only named ones have."""
        named = self._find_named(image.removeprefix(NAMED)) if image.startswith(NAMED) else None
        return ("", "") if named is None else (named.start_command, named.ready_command)

    def with_names(self, find_named: Callable[[str], StoredImage | None]) -> ImageMap:
        """Return the same map with the names of a catalogue."""
        key = self._keys[0] if self._keys else ""
        return ImageMap(self._images, key, find_named)

    def find(self, name: str) -> str | None:
        """Return the image of a name, or None."""
        return self._images.get(name)

    def names_image(self, template: str, metadata: Mapping[str, str]) -> bool:
        """Return True if a create request names an image of this map, or names one by its metadata."""
        return template in self._images or any(key in metadata for key in self._keys)

    def resolve(self, template: str, metadata: Mapping[str, str], snapshots: Mapping[str, str]) -> str:
        """Return the image for a create request; `snapshots` are the owner's snapshots. Raises ImageUnknown."""
        name = next((metadata[key] for key in self._keys if key in metadata), template)
        image = self._images.get(name) or snapshots.get(name)
        if image is None and "/" not in name and self._find_named(name) is not None:
            image = f"{NAMED}{name}"
        if image is None:
            known = ", ".join(sorted(self._images)[:20])
            raise ImageUnknown(f"image {name!r} is not in the image map (--image-map), which has: {known}")
        return image


def load_images(path: Path | None, metadata_key: str) -> ImageMap:
    """Read a TOML or JSON file that maps names to image references. Raises SpecRefused."""
    if path is None:
        return ImageMap(metadata_key=metadata_key)
    try:
        text = path.read_text(encoding="utf-8")
        images = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise SpecRefused(f"--image-map {path}: {error}") from error
    if not isinstance(images, dict) or not all(isinstance(image, str) and image for image in images.values()):
        raise SpecRefused(f'--image-map {path}: must contain only lines of the form `name = "image reference"`')
    return ImageMap(images, metadata_key)


def checked(path: Path | None, images: ImageMap, store: ImageStore) -> ImageMap:
    """Return a map whose names the store can provide, and which finds the store's named images too. Raises SpecRefused
    for a reference that leads nowhere on this host."""
    catalog = ImageCatalog(store.files)
    for name in images.names():
        reference = images.find(name) or ""
        try:
            if reference.startswith(NAMED) and catalog.find(reference.removeprefix(NAMED)) is None:
                raise ImageUnknown("there is no image of that name (headrace image list)")
            if reference != HOST:
                check_reference(reference)
        except SandboxError as error:
            raise SpecRefused(f"--image-map {path}: {name} = {reference!r}: {error.message}") from error
    return images.with_names(lambda name: catalog.find(name) if NAME.fullmatch(name) else None)


LEAST_PATIENCE_S: Final = 60.0
"""Least time for which a create waits for an image that is being unpacked; a longer timeout of its own counts."""


async def prepare_image(provider: object, image: str, patience_s: float) -> None:
    """Wait until an image is unpacked. This comes before the queue of boots: creates that wait for an image must not
    keep others from booting. Raises ImageUnknown, ImageRefused, OutOfDisk, BootFailed, ImagePending."""
    if isinstance(provider, LocalProvider) and image != HOST and not image.startswith(SNAPSHOT):
        await provider.store.resolve(image, patience_s=patience_s)


BOOTS: Final = 16
MAX_WAITING: Final = 1024
_RETRY_AFTER_S: Final = 1.0


class BootQueue:
    """Async context manager around one boot, entered in order of arrival. Raises CapacityExceeded when the queue is
    full."""

    def __init__(self, boots: int = BOOTS, max_waiting: int = MAX_WAITING) -> None:
        self._places = asyncio.Semaphore(boots)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def __aenter__(self) -> Self:
        if self._places.locked() and self._waiting >= self._max_waiting:
            raise CapacityExceeded(f"{self._waiting} sandboxes are already waiting to boot", _RETRY_AFTER_S)
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._places.release()
