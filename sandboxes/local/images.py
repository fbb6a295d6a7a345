"""Images of one launcher: unpacked by the store, handed over as mounts, kept while the launcher may boot them.

Invariants:
- What a launcher has is leased from the store in the launcher's name: it stays as long as the launcher lives.
- At most `max_images` are handed over; above it the least recently used that no sandbox uses is dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import ImageRefused
from headrace.sandboxes.launcher import syscalls
from headrace.sandboxes.launcher.wire import close_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.sandboxes.images.store import ImageLease, ImageStore, ResolvedImage
    from headrace.sandboxes.launcher.wire import Message

    Ask = Callable[[Message, Sequence[int]], Awaitable[Message]]

HOST: Final = "host"
SNAPSHOT: Final = "snapshot:"
_PATIENCE_S: Final = 10.0
"""A create waits so long for an image that is being unpacked; then its caller waits, and asks again."""


class LocalImages:
    """Made for one launcher. `ask` sends it a message with descriptors and returns the answer."""

    def __init__(self, store: ImageStore, ask: Ask, launcher_pid: int, max_images: int) -> None:
        self._store = store
        self._ask = ask
        self._launcher_pid = launcher_pid
        self._max_images = max_images
        self._leases: OrderedDict[str, ImageLease] = OrderedDict()
        self._adding = asyncio.Lock()

    async def provide(self, reference: str) -> str:
        """The name by which the launcher boots it. Raises ImageUnknown, ImageRefused, OutOfDisk, BootFailed, and
        ImagePending for what takes long to unpack."""
        if reference == HOST or reference.startswith(SNAPSHOT):
            return reference
        image = await self._store.resolve(reference, patience_s=_PATIENCE_S)
        async with self._adding:
            if image.digest in self._leases:
                self._leases.move_to_end(image.digest)
                return image.digest
            return await self._take(reference)

    async def _take(self, reference: str) -> str:
        """Lease the image and hand it over."""
        lease = await self._store.lease(reference, holder_pid=self._launcher_pid, patience_s=_PATIENCE_S)
        name = lease.image.digest
        try:
            await self._add(name, lease.image)
        except BaseException:
            await asyncio.shield(lease.release())
            raise
        before, self._leases[name] = self._leases.pop(name, None), lease
        if before is not None:
            # What the reference means changed meanwhile to an image that was there.
            await before.release()
        await self._drop_oldest()
        return name

    async def drop(self, name: str) -> bool:
        """False while sandboxes use it."""
        async with self._adding:
            return await self._drop(name)

    async def provide_again(self, reference: str, name: str) -> str:
        """The launcher does not have `name` any more: another provider dropped it, or it is a new launcher."""
        lease = self._leases.pop(name, None)
        if lease is not None:
            await lease.release()
        return await self.provide(reference)

    async def _drop(self, name: str) -> bool:
        dropped = bool((await self._ask({"op": "drop_image", "name": name}, ()))["dropped"])
        lease = self._leases.pop(name, None) if dropped else None
        if lease is not None:
            await lease.release()
        return dropped

    async def _add(self, name: str, image: ResolvedImage) -> None:
        mounts = await asyncio.to_thread(_mounts_of, image)
        message = {"op": "add_image", "name": name, "environment": dict(image.environment), "folder": image.folder}
        await self._ask(message, mounts)

    async def _drop_oldest(self) -> None:
        for name in list(self._leases)[: max(0, len(self._leases) - self._max_images)]:
            await self._drop(name)

    async def release(self) -> None:
        """The launcher is gone. Idempotent."""
        while self._leases:
            _, lease = self._leases.popitem()
            await lease.release()


def _mounts_of(image: ResolvedImage) -> list[int]:
    mounts: list[int] = []
    try:
        mounts.extend(syscalls.copy_mount(str(layer)) for layer in image.layers)
    except OSError as error:
        close_all(mounts)
        raise ImageRefused(f"image {image.reference!r}: {error}") from error
    return mounts
