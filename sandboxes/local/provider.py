"""Local sandboxes on Linux namespaces: the provider that owns a launcher.

Invariants:
- One launcher per provider: started by it and dead with it, or (`stays_in`) a daemon of the host that the next provider
  adopts. One that died took its sandboxes with it; whoever asked at that moment gets LauncherGone (transient), and the
  next question to the provider starts a new one.
- A launcher that does not answer in time hangs: it is killed, so that it is a dead one.
- A create that is cancelled leaves nothing: the launcher is told to discard it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.sandboxes.base import (
    Feature,
    ImageRef,
    Network,
    SandboxId,
    SandboxInfo,
    SandboxRef,
    SandboxSpec,
)
from headrace.sandboxes.errors import ImageUnknown, LauncherGone, SandboxGone, SpecRefused
from headrace.sandboxes.images.store import ImageStore, default_image_folder
from headrace.sandboxes.kernel.disk_layers import TEMPLATES
from headrace.sandboxes.launcher.wire import close_all
from headrace.sandboxes.local.client import LauncherConnections
from headrace.sandboxes.local.images import LocalImages
from headrace.sandboxes.local.launcher_process import (
    LauncherProcess,
    OwnFolder,
    locked_folder,
    remove_socket,
    runtime_folder,
)
from headrace.sandboxes.local.layer_templates import make_template
from headrace.sandboxes.local.sandbox import LocalSandbox
from headrace.sandboxes.private_folders import make_missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from headrace.sandboxes.launcher.wire import Message

logger = logging.getLogger(__name__)

PROVIDER: Final = "local"
_LEAST_MEMORY_BYTES: Final = 16 << 20
_LEAST_DISK_BYTES: Final = 4 << 20


class LocalSandboxConfig(BaseModel):
    """Limits of one launcher and of each of its sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sandboxes: int = Field(default=512, ge=1, le=16_000)
    """Live and frozen sandboxes at once; above it create raises CapacityExceeded."""
    max_live: int | None = Field(default=None, ge=1, le=16_000)
    """Sandboxes that boot or run at once; above it create raises CapacityExceeded. Each gets this part of the host's
    processes and descriptors, where `pids` and `open_files` are not set. None: 64, or fewer on a small host; in a run
    `sandbox.pool.max_live` and a quarter more, for those that are ending."""
    layer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of a sandbox's file layer, where its spec names no `disk_bytes`; what exceeds it gets ENOSPC."""
    layers_in: Path | None = None
    """A folder of the host's disk for file layers, each a sparse ext4 file on a loop device (slower boots, needs
    mkfs.ext4); None: they lie in memory, as part of `memory_bytes`."""
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Boots are refused (OutOfDisk) while less of that disk, or of the host's memory, is free."""
    memory_bytes: int | None = Field(default=2 << 30, ge=16 << 20)
    """Memory of a sandbox, its file layer included, where its spec names no `memory_bytes`; None for no limit. Kept
    only where control groups are (headrace doctor)."""
    cpus: float | None = Field(default=None, gt=0)
    """Processors of a sandbox, where its spec names no `cpu`; None for a fair share."""
    pids: int | None = Field(default=None, ge=8)
    """Processes of one user in a sandbox, where its spec names no `pids`. None: as many as fit kernel.pid_max and
    fs.file-max in all `max_live` sandboxes, 64 to 512 (headrace doctor shows the sums)."""
    open_files: int | None = Field(default=None, ge=64)
    """Descriptors of one process in a sandbox. None: as many as fit fs.file-max in all processes of all `max_live`
    sandboxes, 64 to 4096."""
    boot_timeout_s: float = Field(default=20.0, gt=0)
    """A sandbox that is not ready by then is killed: BootTimeout."""
    answer_timeout_s: float = Field(default=20.0, gt=0)
    """A launcher that answers nothing for so long (beyond the boot, where one is asked for) is killed and replaced."""
    image_folder: Path | None = None
    """Where images are unpacked, on ext4, xfs, btrfs or tmpfs; by default below the user's cache folder."""
    image_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Above it images that nobody uses go, least recently used first."""
    max_images: int = Field(default=64, ge=1)
    """Images that a launcher holds ready to boot."""
    stays_in: Path | None = None
    """A private folder (a short path). The launcher that serves there outlives its provider: the next one with the same
    folder adopts it with its sandboxes, and until then each lives as long as its lease. None: it dies with the
    provider."""
    owner_pid: int | None = Field(default=None, ge=1)
    """A process whose death ends the launcher; by default that of the provider, or none for a launcher that stays."""
    idle_exit_s: float = Field(default=60.0, gt=0)
    """A launcher that stays ends when it had no sandbox and no provider for so long."""
    label: str = ""
    """Shown in the command line of the launcher and its sandboxes: `leftovers.run_label(run directory)`."""
    runtime_folder: Path | None = None
    """Where socket folders are made; by default below the system's folder for temporary files."""


class LocalProvider:
    """Starts a launcher and asks it for sandboxes. An async context manager; `aclose` ends every sandbox."""

    features = frozenset(Feature)

    def __init__(self, config: LocalSandboxConfig | None = None) -> None:
        self._config = config or LocalSandboxConfig()
        self._connections = LauncherConnections()
        self._launcher: LauncherProcess | None = None
        self._own_folder: OwnFolder | None = None
        self._store = ImageStore(self._config.image_folder or default_image_folder(), self._config.image_bytes)
        self._images: LocalImages | None = None
        self._started = False
        self._starting = asyncio.Lock()
        self._making_templates = asyncio.Lock()

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the launcher, or adopt the one that stays. Raises NamespacesUnavailable with the kernel's reason,
        LauncherGone, SpecRefused, FolderRefused."""
        async with self._starting:
            await self._start()
            self._started = True

    async def _start(self) -> None:
        try:
            launcher = await self._find_launcher()
        except BaseException:
            await self._let_go()
            raise
        self._launcher = launcher
        self._images = LocalImages(self._store, self._ask, launcher.pid, self._config.max_images)
        for controller, reason in launcher.missing.items():
            logger.warning("sandboxes have no %s control group: %s", controller, reason)

    async def _find_launcher(self) -> LauncherProcess:
        if self._config.layers_in is not None:
            await asyncio.to_thread(make_missing, self._config.layers_in / TEMPLATES)
        folder = self._config.stays_in
        if folder is None:
            self._own_folder = await asyncio.to_thread(OwnFolder, runtime_folder(self._config.runtime_folder))
            return await LauncherProcess.start(self._own_folder.path, self._launcher_settings(), tied=True)
        async with locked_folder(folder):
            adopted = await LauncherProcess.adopt(folder)
            if adopted is not None:
                return adopted
            await asyncio.to_thread(remove_socket, folder)
            launcher = await LauncherProcess.start(folder, self._launcher_settings(), tied=False)
            await asyncio.to_thread(launcher.leave_note)
            return launcher

    async def _running_launcher(self) -> LauncherProcess:
        """The launcher, started again if it died. Raises LauncherGone, NamespacesUnavailable."""
        async with self._starting:
            if self._started and (self._launcher is None or not self._launcher.alive):
                await self._let_go()
                await self._start()
            if self._launcher is None:
                raise LauncherGone("the provider is not started: use `async with` or `await provider.start()`")
            return self._launcher

    def _launcher_settings(self) -> dict[str, Any]:
        tied = self._config.stays_in is None
        return {
            "owner_pid": self._config.owner_pid or (os.getpid() if tied else 0),
            "idle_exit_s": self._config.idle_exit_s,
            "max_sandboxes": self._config.max_sandboxes,
            "max_live": self._config.max_live,
            "layer_bytes": self._config.layer_bytes,
            "layers_in": str(self._config.layers_in or ""),
            "min_free_bytes": self._config.min_free_bytes,
            "memory_bytes": self._config.memory_bytes,
            "cpus": self._config.cpus,
            "processes": self._config.pids,
            "open_files": self._config.open_files,
            "boot_timeout_s": self._config.boot_timeout_s,
            "label": self._config.label,
        }

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox, or return the one with the same idempotency key.

        Raises ImageUnknown, SpecRefused, FrozenPathRefused, CapacityExceeded, BootFailed, BootTimeout, LauncherGone.
        """
        _check_spec(spec)
        await self._running_launcher()
        assert self._images is not None
        image = await self._images.provide(spec.image)
        # A key of our own lets a cancelled create be found and discarded.
        key = spec.idempotency_key or f"once-{secrets.token_hex(8)}"
        message = {
            "op": "create",
            "key": key,
            "image": image,
            "ttl_s": spec.ttl_s,
            "labels": dict(spec.labels),
            "disk_bytes": await self._layer_bytes(spec),
            "pids": spec.pids,
            "memory_bytes": spec.memory_bytes,
            "cpus": spec.cpu,
            "mounts": [(mount.source, mount.path, mount.target) for mount in spec.mounts],
            "folders": await self._folders(spec),
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

    async def _layer_bytes(self, spec: SandboxSpec) -> int | None:
        """On disk every size has a template, made once. Raises BootFailed, OutOfDisk."""
        folder = self._config.layers_in
        if folder is None:
            return spec.disk_bytes
        size_bytes = max(spec.disk_bytes or self._config.layer_bytes, _LEAST_DISK_BYTES)
        status = await asyncio.to_thread(os.statvfs, folder)
        if size_bytes > (most := status.f_blocks * status.f_frsize):
            raise SpecRefused(
                f"disk_bytes={size_bytes} is above the ceiling {most}, the size of {folder}; ask for less"
            )
        size_bytes = -(-size_bytes // (1 << 20)) << 20
        async with self._making_templates:
            await asyncio.to_thread(make_template, folder, size_bytes)
        return size_bytes

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
        """CPU seconds, user and system, of the launcher and of all its sandboxes that have ended."""
        return float((await self._admin({"op": "usage"}))["cpu_s"])

    async def command_costs(self) -> dict[str, tuple[int, float]]:
        """`PURPOSE.OPERATION` -> how many commands ended, and their CPU seconds: purpose is the sandbox's label of that
        name, operation is exec, spawn, read or write."""
        return {name: (row[0], row[1]) for name, row in (await self._admin({"op": "usage"}))["commands"].items()}

    async def images(self) -> tuple[ImageRef, ...]:
        """What the launcher has ready to boot beside `host`: digests, and snapshots by what `snapshot` returned."""
        return tuple(ImageRef(name) for name in (await self._admin({"op": "images"}))["images"])

    async def drop_image(self, image: ImageRef) -> bool:
        """Forget a snapshot, or an image that the launcher holds ready. False while sandboxes use it. Idempotent."""
        await self._running_launcher()
        assert self._images is not None
        return await self._images.drop(image)

    async def _ask(self, message: Message, descriptors: Sequence[int]) -> Message:
        """For the images of this launcher: a new one would have none of them."""
        assert self._launcher is not None
        return await self._request(self._launcher, message, descriptors)

    async def _admin(self, message: Message, *, if_cancelled: Message | None = None, extra_s: float = 0.0) -> Message:
        """Ask the launcher, which is started again if it died. Raises its typed error, LauncherGone."""
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
        """Owns `descriptors`."""
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
            raise LauncherGone("the launcher hung and was killed, and its sandboxes with it") from error

    async def aclose(self) -> None:
        """End every sandbox and the launcher, also one that stays. Idempotent."""
        self._started = False
        await self._store.aclose()
        if self._launcher is not None:
            await self._launcher.end()
        await self._let_go()

    async def detach(self) -> None:
        """Leave a launcher that stays, with its sandboxes, to the next provider of its folder."""
        if self._config.stays_in is None:
            raise SpecRefused("the launcher ends with its provider: set stays_in")
        self._started = False
        await self._store.aclose()
        await self._let_go(leases=False)

    async def _let_go(self, *, leases: bool = True) -> None:
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


def _check_spec(spec: SandboxSpec) -> None:
    if spec.network is not Network.NONE:
        raise SpecRefused(f"network {spec.network.value!r}: the local provider has only `none`")
    for name, least in (("cpu", 0.01), ("memory_bytes", _LEAST_MEMORY_BYTES), ("disk_bytes", 1 << 16), ("pids", 8)):
        value = getattr(spec, name)
        if value is not None and not least <= value < 1 << 62:
            raise SpecRefused(f"{name}={value}: must be at least {least}")
    if not 0 < spec.ttl_s < 1e9:
        raise SpecRefused(f"ttl_s={spec.ttl_s}: must be a number of seconds above 0")
