"""Catalogue of named images, in the image store's folder.

Invariants:
- The layers of a named image are never evicted; they become ordinary layers when its name is removed.
- An entry is complete: it is written elsewhere, synced, then renamed, and only if all its layers exist.
- A name is one file, whatever it contains: it cannot lead out of the catalogue's folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace.sandboxes.errors import CapacityExceeded, ImageRefused, SpecRefused
from headrace.sandboxes.images.folders import StoreFolder, damaged

logger = logging.getLogger(__name__)

NAME: Final = re.compile(r"(?!.*/\.{0,2}(/|$))[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
"""Letters, digits and ._/-, without empty parts, `.` and `..`."""
NAMED: Final = "image:"
"""Prefix of references to named images."""
BUILT: Final = "built:"
"""Prefix of references to images that `builder` has recorded; no client can name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """An image in the store. `created_at` is in Unix seconds."""

    name: str
    """Name in the catalogue; "" for a finished build that has none."""
    source: str
    """What it was made from: an image reference, or a template's base."""
    digest: str
    layers: tuple[str, ...]
    """Digests of layers in the store, topmost first, or absolute paths of folders that are used in place."""
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    """Working folder; "" for `/`."""
    user: str = ""
    """User of commands; "" for root."""
    size_bytes: int = 0
    created_at: float = 0.0
    start_command: str = ""
    ready_command: str = ""
    network: str = "none"
    """Network that its build steps had: `none` or `host`."""
    history: tuple[str, ...] = ()
    shows_host: bool = False
    """True if it was built above the image `host`, whose programs it needs."""

    cached_layers: int = 0
    """Layers of its build that came from the cache."""
    made_layers: int = 0

    @property
    def reference(self) -> str:
        """Reference by which the store finds the image."""
        return f"{NAMED}{self.name}" if self.name else f"{BUILT}{self.digest.removeprefix('sha256:')}"


class ImageCatalog:
    """Named images of one store; several processes may use it."""

    def __init__(self, store: StoreFolder) -> None:
        self._store = store

    def _path(self, name: str) -> Path:
        return self._store.home / "named" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def put(self, image: StoredImage) -> None:
        """Add or replace a named image. Raises SpecRefused (the name), CapacityExceeded (a layer has been evicted),
        OSError."""
        if not NAME.fullmatch(image.name):
            raise SpecRefused(f"image name {image.name[:200]!r}: must have letters, digits and ._/- (at most 200)")
        with self._store.lock("eviction"):
            if not all(self._store.tree(digest).is_dir() for digest in image.layers):
                raise CapacityExceeded(f"a layer of image {image.name!r} was evicted: raise image_bytes")
            self._store.write_named(self._path(image.name).name, json.dumps(asdict(image)))

    def find(self, name: str) -> StoredImage | None:
        """Return a named image, or None if there is none, or if a folder that it uses in place is gone. Raises
        ImageRefused for a damaged entry."""
        with suppress(FileNotFoundError):
            return self._read(self._path(name))
        return None

    def all(self) -> list[StoredImage]:
        """Return all named images by name; damaged entries are logged."""
        found = []
        for path in self._store.named():
            try:
                found.append(self._read(path))
            except FileNotFoundError:
                continue
            except ImageRefused as error:
                logger.warning("%s", error.message)
        return sorted((image for image in found if image is not None), key=lambda image: image.name)

    def remove(self, name: str) -> bool:
        """Remove a name. Returns False if there is none. Sandboxes of the image live on."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _read(self, path: Path) -> StoredImage | None:
        try:
            document: dict[str, Any] = json.loads(path.read_bytes())
            tuples = {name: tuple(document.get(name, ())) for name in ("layers", "history")}
            image = StoredImage(**{**document, **tuples})
        except (ValueError, TypeError, AttributeError) as error:
            raise damaged(path) from error
        return image if all(self._store.tree(digest).is_dir() for digest in image.layers) else None
