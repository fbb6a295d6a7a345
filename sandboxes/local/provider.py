"""Provider of local sandboxes, which uses Linux namespaces and owns a launcher.

Invariants:
- There is one launcher per provider: it dies with the provider, or (`stays_in`) it is a daemon on the host that the
  next provider adopts. When a launcher dies, its sandboxes die too; callers waiting for it get LauncherGone
  (transient), and the next request starts a new launcher.
- A launcher that does not answer in time is considered hung: it is killed and then treated like a dead one.
- A cancelled create leaves nothing behind: the launcher is asked to discard it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.base import Feature, ImageRef, Network, SandboxId, SandboxInfo, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import ImageUnknown, LauncherGone, SandboxGone, SpecRefused, Unsupported
from headrace.sandboxes.host.private_folders import make_missing
from headrace.sandboxes.images.layer_copy import OwnLayer
from headrace.sandboxes.images.store import ImageStore, default_image_folder
from headrace.sandboxes.launcher.sandbox_record import Settings
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.linux.disk_layers import TEMPLATES
from headrace.sandboxes.local.client import LauncherConnections
from headrace.sandboxes.local.images import LayerTemplates, LocalImages
from headrace.sandboxes.local.launcher_process import (
    LauncherProcess,
    ProviderFolder,
    locked_folder,
    remove_socket,
    runtime_folder,
)
from headrace.sandboxes.local.sandbox import LocalSandbox

logger = logging.getLogger(__name__)

PROVIDER: Final = "local"
_LEAST_MEMORY_BYTES: Final = 16 << 20


class LocalSandboxSection(Section):
    """Limits of one launcher and of each of its sandboxes: the keys of a recipe's `[sandbox.local]`."""

    max_live: int | None = Field(default=None, ge=1, le=16_000)
    """Maximum number of sandboxes booting or running; beyond it, create raises CapacityExceeded. None means 64, or
    fewer on a small host; in a run, it means 1.25 times `sandbox.pool.max_live`, to leave room for sandboxes that are
    ending."""
    layer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of a sandbox's file layer if its spec has no `disk_bytes`; further writes fail with ENOSPC."""
    layers_in: Path | None = None
    """Folder on the host's disk for file layers, each a sparse ext4 file on a loop device (slower boots, needs
    mkfs.ext4). None means they are stored in memory, as part of `memory_bytes`."""
    memory_bytes: int | None = Field(default=2 << 30, ge=16 << 20)
    """Memory limit of a sandbox, including its file layer, if its spec has no `memory_bytes`; None for no limit.
    Enforced only where control groups are available (headrace doctor)."""
    cpus: float | None = Field(default=None, gt=0)
    """Processors per sandbox if its spec has no `cpu`; None for a fair share."""
    pids: int | None = Field(default=None, ge=8)
    """Maximum number of processes per user in a sandbox if its spec has no `pids`. None means 512, or where no control
    group counts them as many as fit in all `max_live` sandboxes. When all sandboxes together hold seven eighths of what
    this host allows them (headrace doctor), the commands of the largest holder above its even share are killed."""
    open_files: int | None = Field(default=None, ge=64)
    """Maximum number of descriptors per process in a sandbox. None means 4096. When three quarters of fs.file-max are
    open on this host, the commands of the sandbox that holds most, and more than its even share, are killed."""
    boot_timeout_s: float = Field(default=20.0, gt=0)
    """Time after which a sandbox that is not ready is killed and create raises BootTimeout."""
    image_folder: Path | None = None
    """Folder for unpacked images, on ext4, xfs, btrfs or tmpfs; by default below the user's cache folder."""
    image_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Above this total, unused images are evicted, least recently used first."""


class LocalSandboxConfig(LocalSandboxSection):
    """All settings of one launcher."""

    max_sandboxes: int = Field(default=512, ge=1, le=16_000)
    """Maximum number of live and frozen sandboxes; beyond it, create raises CapacityExceeded."""
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Boots are refused (OutOfDisk) while less than this is free on the disk of the layers, or in the host's memory."""
    answer_timeout_s: float = Field(default=20.0, gt=0)
    """A launcher that sends no answer for this long (for a boot, measured from the end of the boot timeout) is killed
    and replaced."""
    image_patience_s: float = Field(default=10.0, gt=0)
    """Time for which create waits for an image that is being unpacked; after that it raises ImagePending, and the
    caller asks again. Unpacking goes on meanwhile."""
    max_images: int = Field(default=64, ge=1)
    """Maximum number of images that a launcher keeps ready to boot."""
    stays_in: Path | None = None
    """A private folder (a short path). The launcher that serves there outlives its provider: the next provider with the
    same folder adopts it with its sandboxes, and until then each sandbox lives as long as its lease. None means the
    launcher dies with the provider."""
    owner_pid: int | None = Field(default=None, ge=1)
    """Process whose death ends the launcher; by default the provider's process, or none for a launcher that stays."""
    idle_exit_s: float = Field(default=60.0, gt=0)
    """A launcher that stays exits after this long without sandboxes or providers."""
    allow_host_network: bool = False
    """Accept specs with the network `host`, which image builds may use: such a sandbox reaches every service that this
    host reaches, those on its loopback included."""
    label: str = ""
    """Label in the command lines of the launcher and its sandboxes, from `leftovers.run_label(run directory)`."""
    runtime_folder: Path | None = None
    """Folder in which socket folders are created; by default below the system's folder for temporary files."""

    def launcher_settings(self) -> dict[str, Any]:
        """Return the settings that are sent to the launcher, except those chosen when it is started."""
        settings = self.model_dump(include=set(Settings._fields))
        settings["owner_pid"] = self.owner_pid or (os.getpid() if self.stays_in is None else 0)
        settings["layers_in"] = str(self.layers_in or "")
        return settings


class LocalProvider:
    """Provider that boots sandboxes in its own launcher. An async context manager; `aclose` ends every sandbox."""

    features = frozenset(Feature)

    def __init__(self, config: LocalSandboxConfig | None = None) -> None:
        self._config = config or LocalSandboxConfig()
        self._connections = LauncherConnections()
        self._launcher: LauncherProcess | None = None
        self._own_folder: ProviderFolder | None = None
        self.store = ImageStore(self._config.image_folder or default_image_folder(), self._config.image_bytes)
        self._images: LocalImages | None = None
        self._started = False
        self._starting = asyncio.Lock()
        layers_in = self._config.layers_in
        self._templates = None if layers_in is None else LayerTemplates(layers_in)

    @property
    def endpoint(self) -> str:
        """Path of the launcher's socket."""
        if self._launcher is None:
            raise LauncherGone("the provider is not started: use `async with` or `await provider.start()`")
        return self._launcher.endpoint

    @property
    def launcher_pid(self) -> int | None:
        return None if self._launcher is None else self._launcher.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the launcher, or adopt the one that stays. Raises NamespacesUnavailable with the kernel's reason,
        LauncherGone, SpecRefused, FolderRefused."""
        async with self._starting:
            await self._start()
            self._started = True

    async def _start(self) -> None:
        config, settings = self._config, self._config.launcher_settings()
        try:
            if config.layers_in is not None:
                await asyncio.to_thread(make_missing, config.layers_in / TEMPLATES)
            if config.stays_in is None:
                self._own_folder = await asyncio.to_thread(ProviderFolder, runtime_folder(config.runtime_folder))
                launcher = await LauncherProcess.start(self._own_folder.path, settings, tied=True)
            else:
                async with locked_folder(config.stays_in):
                    adopted = await LauncherProcess.adopt(config.stays_in)
                    if adopted is None:
                        await asyncio.to_thread(remove_socket, config.stays_in)
                        adopted = await LauncherProcess.start(config.stays_in, settings, tied=False)
                        await asyncio.to_thread(adopted.leave_note)
                    launcher = adopted
        except BaseException:
            await self._release()
            raise
        self._launcher = launcher
        self._images = LocalImages(self.store, self._ask, launcher.pid, config.max_images, config.image_patience_s)
        for controller, reason in launcher.missing.items():
            logger.warning("sandboxes have no %s control group: %s", controller, reason)

    async def _running_launcher(self) -> LauncherProcess:
        """Return the launcher, restarting it if it has died. Raises LauncherGone, NamespacesUnavailable."""
        async with self._starting:
            if self._started and (self._launcher is None or not self._launcher.alive):
                await self._release()
                await self._start()
            if self._launcher is None:
                raise LauncherGone("the provider is not started: use `async with` or `await provider.start()`")
            return self._launcher

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox, or return the one with the same idempotency key. Raises ImageUnknown, SpecRefused,
        FrozenPathRefused, CapacityExceeded, BootFailed, BootTimeout, LauncherGone."""
        if spec.network is not Network.NONE and not self._config.allow_host_network:
            text = "the local provider supports only `none`, unless allow_host_network is set"
            raise SpecRefused(f"network {spec.network.value!r}: {text}")
        for name, least in (("cpu", 0.01), ("memory_bytes", _LEAST_MEMORY_BYTES), ("disk_bytes", 1 << 16), ("pids", 8)):
            value = getattr(spec, name)
            if value is not None and not least <= value < 1 << 62:
                raise SpecRefused(f"{name}={value}: must be at least {least}")
        if not 0 < spec.ttl_s < 1e9:
            raise SpecRefused(f"ttl_s={spec.ttl_s}: must be a number of seconds above 0 and below 1e9")
        await self._running_launcher()
        assert self._images is not None
        image = await self._images.provide(spec.image)
        disk_bytes = spec.disk_bytes
        if self._templates is not None:
            disk_bytes = await self._templates.provide(disk_bytes or self._config.layer_bytes)
        # A generated key allows a cancelled create to be found and discarded.
        key = spec.idempotency_key or f"once-{secrets.token_hex(8)}"
        message = {
            "op": "create",
            "key": key,
            "image": image,
            "ttl_s": spec.ttl_s,
            "labels": dict(spec.labels),
            "disk_bytes": disk_bytes,
            "pids": spec.pids,
            "memory_bytes": spec.memory_bytes,
            "cpus": spec.cpu,
            "host_network": spec.network is Network.HOST,
            "mounts": [(mount.source, mount.path, mount.target) for mount in spec.mounts],
            "folders": await self._folders(spec),
            "guest": None if spec.guest is None else spec.guest.to_json(),
        }
        try:
            answer = await self._ask_for_boot(message)
        except ImageUnknown:
            if image == spec.image and not spec.folders:
                raise
            again = await self._images.provide_again(spec.image, image)
            answer = await self._ask_for_boot({**message, "image": again, "folders": await self._folders(spec)})
        return SandboxRef(
            provider=PROVIDER, id=SandboxId(answer["sandbox"]), endpoint=answer["endpoint"], secret=answer["secret"]
        )

    async def _folders(self, spec: SandboxSpec) -> list[tuple[str, str]]:
        assert self._images is not None
        return [(await self._images.provide_folder(folder.source), folder.target) for folder in spec.folders]

    async def _ask_for_boot(self, message: Message) -> Message:
        discard = {"op": "discard", "key": message["key"]}
        return await self._admin(message, if_cancelled=discard, extra_s=self._config.boot_timeout_s)

    async def attach(self, ref: SandboxRef) -> LocalSandbox:
        return LocalSandbox(ref, self._connections)

    async def list(self) -> list[SandboxInfo]:
        answer = await self._admin({"op": "list"})
        return [
            SandboxInfo(
                id=SandboxId(row["id"]),
                state=row["state"],
                expires_in_s=row["expires_in_s"],
                labels=row["labels"],
                idempotency_key=row["key"],
            )
            for row in answer["sandboxes"]
        ]

    async def destroy(self, sandbox: SandboxId) -> None:
        with suppress(SandboxGone):
            await self._admin({"op": "kill", "sandbox": sandbox})

    async def cpu_s(self) -> float:
        """Return the CPU seconds (user and system) used by the launcher and by all its sandboxes that have ended."""
        return float((await self._admin({"op": "usage"}))["cpu_s"])

    async def command_costs(self) -> dict[str, tuple[int, float]]:
        """Return the number of finished commands and their CPU seconds by `PURPOSE.OPERATION`. The purpose is the
        sandbox's label of that name; the operation is exec, spawn, run, read or write."""
        return {name: (row[0], row[1]) for name, row in (await self._admin({"op": "usage"}))["commands"].items()}

    async def own_layer(self, ref: SandboxRef) -> OwnLayer:
        """Return the files that a frozen sandbox has written. Raises SpecRefused (not frozen), SandboxGone, and
        Unsupported without root."""
        answer = await self._admin({"op": "own_layer", "sandbox": ref.id})
        [descriptor] = answer["descriptors"]
        if answer["single_id"]:
            os.close(descriptor)
            raise Unsupported("images can be built by root only: a sandbox without root has a single user id")
        return OwnLayer(descriptor, answer["base_id"])

    async def images(self) -> tuple[ImageRef, ...]:
        """Return the images, other than `host`, that the launcher keeps ready: digests, and names of snapshots."""
        return tuple(ImageRef(name) for name in (await self._admin({"op": "images"}))["images"])

    async def drop_image(self, image: ImageRef) -> bool:
        """Forget a snapshot or an image that the launcher holds. Returns False while sandboxes use it. Idempotent."""
        await self._running_launcher()
        assert self._images is not None
        return await self._images.drop(image)

    async def _ask(self, message: Message, descriptors: Sequence[int]) -> Message:
        """Send a request about images to this launcher without restarting it, because a new launcher would have none of
        them."""
        assert self._launcher is not None
        return await self._request(self._launcher, message, descriptors)

    async def _admin(self, message: Message, *, if_cancelled: Message | None = None, extra_s: float = 0.0) -> Message:
        """Send a request to the launcher, restarting it if it has died. Raises its typed errors and LauncherGone."""
        launcher = await self._running_launcher()
        answer = await self._request(launcher, message, if_cancelled=if_cancelled, extra_s=extra_s)
        return {**answer, "endpoint": launcher.endpoint}

    async def _request(
        self,
        launcher: LauncherProcess,
        message: Message,
        descriptors: Sequence[int] = (),
        *,
        if_cancelled: Message | None = None,
        extra_s: float = 0.0,
    ) -> Message:
        """Send a request with the admin secret, taking ownership of `descriptors`."""
        try:
            client = await self._connections.get(launcher.endpoint)
        except BaseException:
            close_all(descriptors)
            raise
        patience_s = self._config.answer_timeout_s + extra_s
        try:
            return await client.request({**message, "secret": launcher.secret}, descriptors, patience_s=patience_s)
        except asyncio.CancelledError:
            if if_cancelled is not None:
                client.post({**if_cancelled, "secret": launcher.secret})
            raise
        except TimeoutError as error:
            await launcher.kill()
            raise LauncherGone("the launcher hung; it was killed together with its sandboxes") from error

    async def aclose(self) -> None:
        """End every sandbox and the launcher, even one that stays. Idempotent."""
        self._started = False
        await self.store.aclose()
        if self._launcher is not None:
            await self._launcher.end()
        await self._release()

    async def detach(self) -> None:
        """Leave a launcher that stays, with its sandboxes, to the next provider with the same folder. Raises
        SpecRefused."""
        if self._config.stays_in is None:
            raise SpecRefused("the launcher ends with its provider: set stays_in")
        self._started = False
        await self.store.aclose()
        await self._release(leases=False)

    async def _release(self, *, leases: bool = True) -> None:
        self._connections.close()
        images, self._images = self._images, None
        if images is not None and leases:
            await images.release()
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()
        folder, self._own_folder = self._own_folder, None
        if folder is not None:
            await asyncio.to_thread(folder.remove)
