"""Table of the images that a launcher can boot: the host, images handed over by its owner, and snapshots.

Host folders that are mounted in sandboxes are entries too, each with one layer.

Invariants:
- An image is kept while a sandbox, even a frozen one, uses it; a layer is kept while an image or a sandbox uses it.
- A snapshot retains its sandbox's layer and ids; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.sandboxes.launcher.requests import FOLDER
from headrace.sandboxes.linux import rootfs
from headrace.sandboxes.linux.rootfs import HOST, Image, Layer

HOST_NAME: Final = "host"


class ImageTable:
    """Images by name. `drop_snapshot(sandbox id, base id)` is called when the layer of a snapshot is no longer used.
    `id_map()` returns any user namespace, for a trial mount of a layer."""

    def __init__(self, drop_snapshot: Callable[[str, int], None], id_map: Callable[[], int]) -> None:
        self._drop_snapshot = drop_snapshot
        self._id_map = id_map
        self._images: dict[str, Image] = {HOST_NAME: HOST}
        self._users: dict[str, int] = {}
        self._holders: dict[Layer, int] = {}
        self._snapshots: dict[Layer, str] = {}
        self._last_number = 0

    @property
    def names(self) -> list[str]:
        return [name for name in self._images if name != HOST_NAME and not name.startswith(FOLDER)]

    def find(self, name: str) -> Image | None:
        return self._images.get(name)

    def add(
        self, name: str, mounts: Sequence[int], environment: dict[str, str], folder: str, *, shows_host: bool = False
    ) -> None:
        """Add an image whose layers are host folders, given as detached mounts, topmost first. With `shows_host` they
        are files of sandboxes of the image `host` and need the host's programs. Raises OSError."""
        if name in self._images:
            return
        layers: list[Layer] = []
        try:
            for mount in mounts:
                self._last_number += 1
                layers.append(rootfs.add_layer(self._last_number, mount, self._id_map()))
        except OSError:
            for layer in layers:
                rootfs.drop_image_layer(layer)
            raise
        self._put(name, Image(tuple(layers), shows_host, environment, folder))

    def add_snapshot(self, sandbox_id: str, base_id: int, image: Image) -> str:
        """Add an image that puts a dead sandbox's layer on top of the image it was booted from, and return its name."""
        name = f"snapshot:{sandbox_id}"
        layer = Layer(rootfs.own_layer(sandbox_id, image), base_id)
        self._snapshots[layer] = sandbox_id
        self._put(name, image.above(layer))
        return name

    def _put(self, name: str, image: Image) -> None:
        self._images[name] = image
        for layer in image.layers:
            self._holders[layer] = self._holders.get(layer, 0) + 1

    def take(self, name: str) -> Image:
        """Return an image and count one more sandbox as its user."""
        self._users[name] = self._users.get(name, 0) + 1
        return self._images[name]

    def release(self, name: str) -> None:
        self._users[name] -= 1

    def drop(self, name: str) -> bool:
        """Forget an image. Returns False while sandboxes use it, and for the image `host`; returns True for an unknown
        image."""
        if name == HOST_NAME or self._users.get(name, 0) > 0:
            return False
        image = self._images.pop(name, None)
        self._users.pop(name, None)
        for layer in image.layers if image is not None else ():
            self._holders[layer] -= 1
            if self._holders[layer] == 0:
                del self._holders[layer]
                sandbox_id = self._snapshots.pop(layer, None)
                if sandbox_id is None:
                    rootfs.drop_image_layer(layer)
                else:
                    self._drop_snapshot(sandbox_id, layer.base_id)
        return True
