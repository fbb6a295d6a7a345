"""Images of one launcher, unpacked by the store, handed over as mounts, and leased while the launcher may boot them.

Invariants:
- An image that a launcher holds is leased from the store in the launcher's name and stays as long as the launcher
  lives.
- At most `max_images` images are handed over; beyond that, the least recently used one without sandboxes is dropped.
- Host folders are handed over once and stay; a folder that has been replaced at the same path is handed over again.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import BootFailed, ImageRefused, OutOfDisk, SpecRefused, Unsupported
from headrace.sandboxes.host.child_environment import child_environment
from headrace.sandboxes.images.store import ImageLease, ImageStore
from headrace.sandboxes.launcher.requests import FOLDER
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.linux.disk_layers import template_name

SendRequest = Callable[[Message, Sequence[int]], Awaitable[Message]]

HOST: Final = "host"
SNAPSHOT: Final = "snapshot:"


class LocalImages:
    """Images that one launcher holds. `send_request` sends the launcher a message with descriptors and returns the
    answer."""

    def __init__(
        self, store: ImageStore, send_request: SendRequest, launcher_pid: int, max_images: int, patience_s: float
    ) -> None:
        self._store = store
        self._send_request = send_request
        self._launcher_pid = launcher_pid
        self._max_images = max_images
        self._patience_s = patience_s
        self._leases: OrderedDict[str, ImageLease] = OrderedDict()
        self._folders: set[str] = set()
        self._adding = asyncio.Lock()

    async def provide(self, reference: str) -> str:
        """Return the name by which the launcher boots an image. Raises ImageUnknown, ImageRefused, OutOfDisk,
        BootFailed, and ImagePending if the image takes long to unpack."""
        if reference == HOST or reference.startswith(SNAPSHOT):
            return reference
        image = await self._store.resolve(reference, patience_s=self._patience_s)
        async with self._adding:
            if image.digest in self._leases:
                self._leases.move_to_end(image.digest)
                return image.digest
            lease = await self._store.lease(reference, holder_pid=self._launcher_pid, patience_s=self._patience_s)
            image, name = lease.image, lease.image.digest
            try:
                try:
                    mounts = await asyncio.to_thread(_mounts_of, image.layers)
                except OSError as error:
                    raise ImageRefused(f"image {image.reference!r}: {error}") from error
                entry = {"name": name, "environment": dict(image.environment), "folder": image.folder}
                await self._send_request({"op": "add_image", **entry, "shows_host": image.shows_host}, mounts)
            except BaseException:
                await asyncio.shield(lease.release())
                raise
            before, self._leases[name] = self._leases.pop(name, None), lease
            if before is not None:
                # The reference has changed meanwhile to an image that the launcher already held.
                await before.release()
            for oldest in list(self._leases)[: max(0, len(self._leases) - self._max_images)]:
                await self._drop(oldest)
            return name

    async def provide_folder(self, source: str) -> str:
        """Return the name by which the launcher knows a host folder. Raises SpecRefused, Unsupported."""
        name = await asyncio.to_thread(_folder_name, source)
        async with self._adding:
            if name not in self._folders:
                try:
                    mounts = await asyncio.to_thread(_mounts_of, (source,))
                except PermissionError as error:
                    raise Unsupported(f"folder {source}: only root can mount host folders ({error})") from error
                except OSError as error:
                    raise SpecRefused(f"folder {source}: {error}") from error
                await self._send_request({"op": "add_image", "name": name, "environment": {}, "folder": ""}, mounts)
                self._folders.add(name)
        return name

    async def drop(self, name: str) -> bool:
        """Drop an image. Returns False while sandboxes use it."""
        async with self._adding:
            return await self._drop(name)

    async def provide_again(self, reference: str, name: str) -> str:
        """Provide an image that the launcher no longer has, because another provider dropped it or the launcher is
        new."""
        self._folders.clear()
        lease = self._leases.pop(name, None)
        if lease is not None:
            await lease.release()
        return await self.provide(reference)

    async def _drop(self, name: str) -> bool:
        dropped = bool((await self._send_request({"op": "drop_image", "name": name}, ()))["dropped"])
        lease = self._leases.pop(name, None) if dropped else None
        if lease is not None:
            await lease.release()
        return dropped

    async def release(self) -> None:
        """Release all leases once the launcher is gone. Idempotent."""
        while self._leases:
            _, lease = self._leases.popitem()
            await lease.release()


def _mounts_of(folders: Sequence[Path | str]) -> list[int]:
    mounts: list[int] = []
    try:
        mounts.extend(syscalls.copy_mount(str(folder)) for folder in folders)
    except OSError:
        close_all(mounts)
        raise
    return mounts


def _folder_name(source: str) -> str:
    try:
        status = Path(source).stat()
    except (OSError, ValueError) as error:
        raise SpecRefused(f"folder {source!r}: {error}") from error
    if not Path(source).is_absolute() or not stat.S_ISDIR(status.st_mode):
        raise SpecRefused(f"folder {source}: must be the absolute path of a folder on the host")
    return f"{FOLDER}{status.st_dev}:{status.st_ino}"


_LEAST_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 60.0
# No journal: after a crash the file system is dropped with its sandbox.
_OPTIONS: Final = ("-b", "4096", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=1,nodiscard")


class LayerTemplates:
    """Templates for disk layers, in one folder on the host's disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = asyncio.Lock()

    async def provide(self, size_bytes: int) -> int:
        """Make the template for a layer of this size, and return the size rounded up to the template's. Raises
        SpecRefused, BootFailed, OutOfDisk."""
        size_bytes = max(size_bytes, _LEAST_BYTES)
        status = await asyncio.to_thread(os.statvfs, self._folder)
        if size_bytes > (most := status.f_blocks * status.f_frsize):
            text = f"disk_bytes={size_bytes} is above the ceiling {most}, the size of {self._folder}; request less"
            raise SpecRefused(text)
        size_bytes = -(-size_bytes // (1 << 20)) << 20
        async with self._making:
            await asyncio.to_thread(make_template, self._folder, size_bytes)
        return size_bytes


def make_template(folder: Path, size_bytes: int) -> None:
    """Make the template for a size unless it already exists. Raises BootFailed, OutOfDisk."""
    path = folder / template_name(size_bytes)
    if path.exists():
        return
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.truncate(size_bytes)
        environment = child_environment(PATH=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        command = ("mkfs.ext4", "-q", "-F", *_OPTIONS, draft)
        subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S, env=environment)
        draft.rename(path)
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip()
        raise (OutOfDisk if "No space" in text else BootFailed)(f"mkfs.ext4: {text}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BootFailed(f"layers on disk need mkfs.ext4 (package e2fsprogs) and a writable folder: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
