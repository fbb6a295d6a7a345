"""Provider of sandboxes in containers of an OCI runtime, runc or runsc (gVisor), without a daemon.

Invariants:
- One keeper process per provider is the parent of all its containers and holds their file layers. The containers end
  with the provider or the keeper; files and cgroups that remain are removed when the next provider starts.
- A sandbox has a folder with its secret, its lease and its state, so that any process can attach to it.
- Each sandbox has its own id range, cgroup and network; its image is shared, read-only and leased.
- A create that fails or is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.sandboxes.base import Feature, Network, SandboxId, SandboxInfo, SandboxRef, SandboxSpec, refuse_extras
from headrace.sandboxes.errors import BootTimeout, CapacityExceeded, FolderRefused, SandboxGone, SpecRefused
from headrace.sandboxes.host.private_folders import make_missing, user_folder
from headrace.sandboxes.images.folders import Owner, is_alive, new_owner, remove
from headrace.sandboxes.images.merged_tree import find
from headrace.sandboxes.images.store import ImageLease, ImageStore
from headrace.sandboxes.linux import rootfs
from headrace.sandboxes.linux.id_blocks import IDS_PER_SANDBOX
from headrace.sandboxes.oci import cgroups as oci_cgroups
from headrace.sandboxes.oci.bundle import BindMount, BundlePlan, Limits, bundle_config
from headrace.sandboxes.oci.container import PAUSED_MARK, STATE_FILE, ContainerState, open_private
from headrace.sandboxes.oci.keeper import PID_FILE
from headrace.sandboxes.oci.keeper_client import KeeperClient
from headrace.sandboxes.oci.runtime import HOST_IMAGE, OciRuntime, RuntimeKind, host_skeleton, system_folders
from headrace.sandboxes.oci.sandbox import OciSandbox
from headrace.sandboxes.unprotected.sandbox_folder import SandboxFolder

_FIRST_ID: Final = 0x60000000
_IMAGE_PATIENCE_S: Final = 10.0
"""Time for which a create waits for an image that is being unpacked; after that, the caller has to wait and retry."""
_ID_RANGES: Final = 30_000
_SANDBOXES: Final = "sandboxes"
_PASSABLE: Final = 0o711
"""Searchable but not readable for other users, because the root of a container has another user id."""
_FEATURES: Final = {
    RuntimeKind.RUNC: frozenset({Feature.FREEZE, Feature.PAUSE, Feature.SPAWN, Feature.USAGE}),
    # A paused gVisor still runs new commands, and its processes are invisible to this kernel.
    RuntimeKind.RUNSC: frozenset({Feature.FREEZE}),
}


class OciSandboxConfig(BaseModel):
    """Limits of one provider and of each of its sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: RuntimeKind = RuntimeKind.RUNC
    """Program that runs the containers; it must be installed."""
    max_sandboxes: int = Field(default=256, ge=1, le=10_000)
    """Maximum number of live and frozen sandboxes; further creates raise CapacityExceeded."""
    layer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of a sandbox's file layer in memory, unless its spec has `disk_bytes`; further writes fail with ENOSPC. The
    layer counts towards the sandbox's memory."""
    memory_bytes: int | None = Field(default=None, ge=16 << 20)
    """Memory limit of a sandbox, including its file layer, unless its spec has `memory_bytes`; None for no limit."""
    pids: int = Field(default=512, ge=8)
    """Maximum number of processes in a sandbox, unless its spec has `pids`."""
    open_files: int = Field(default=4096, ge=64)
    """Maximum number of open files per process in a sandbox; must not exceed the limit of the provider's own
    process."""
    boot_timeout_s: float = Field(default=60.0, gt=0)
    """Time after which a sandbox that is not ready is killed and create raises BootTimeout."""
    image_folder: Path | None = None
    """Folder for unpacked images; by default below the system's folder for temporary files. Several providers may share
    it."""
    image_bytes: int = Field(default=50 << 30, ge=1 << 20)
    """Disk space for unpacked images; the least recently used are removed first."""
    runtime_folder: Path | None = None
    """Folder that contains the sandboxes' folders; by default below the system's folder for temporary files. All its
    parent folders must be searchable by other users, because the root of a container has another user id."""


@dataclass(slots=True)
class _Sandbox:
    spec: SandboxSpec
    ref: SandboxRef
    slot: int
    image: ImageLease | None = None
    timer: asyncio.TimerHandle | None = None


class OciProvider:
    """Boots sandboxes in containers. An async context manager; `aclose` ends every sandbox."""

    def __init__(self, config: OciSandboxConfig | None = None) -> None:
        self._config = config or OciSandboxConfig()
        self._images: ImageStore | None = None
        self._home: Path | None = None
        self._keeper: KeeperClient | None = None
        self._starting = asyncio.Lock()
        self._keys: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._sandboxes: dict[SandboxId, _Sandbox] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def features(self) -> frozenset[Feature]:
        return _FEATURES[self._config.runtime]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the keeper. Raises NamespacesUnavailable (the runtime is not installed), BootFailed, FolderRefused."""
        async with self._starting:
            if self._keeper is not None and self._keeper.alive:
                return
            await self._end()
            OciRuntime(self._config.runtime, Path("/nonexistent"))
            parent = self._config.runtime_folder or user_folder("oci", _PASSABLE)
            # Remove the folders of providers that died together with their keepers.
            homes = await asyncio.to_thread(lambda: list(parent.iterdir()) if parent.is_dir() else [])
            for home in homes:
                if not is_alive(Owner(home.name)):
                    await _remove_home(home)
            self._home = await asyncio.to_thread(_make_home, parent)
            if self._images is None:
                images = self._config.image_folder or user_folder("images")
                self._images = ImageStore(images, self._config.image_bytes)
            self._keeper = await KeeperClient.start()

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox, or return the one with the same idempotency key.

        Raises ImageUnknown, ImageRefused, OutOfDisk, SpecRefused, FrozenPathRefused, CapacityExceeded, BootFailed,
        BootTimeout, LauncherGone.
        """
        if spec.network is not Network.NONE:
            raise SpecRefused(f"network {spec.network.value!r}: the oci provider supports only `none`")
        refuse_extras(spec, "oci")
        for name in ("cpu", "memory_bytes", "disk_bytes", "pids", "ttl_s"):
            value = getattr(spec, name)
            if value is not None and not value > 0:
                raise SpecRefused(f"{name}={value}: must be greater than 0")
        for mount in spec.mounts:
            try:
                rootfs.check_target(mount.target)
            except rootfs.MountRefused as error:
                raise SpecRefused(str(error)) from error
        if not spec.idempotency_key:
            return await self._create(spec)
        lock = self._keys.setdefault(spec.idempotency_key, asyncio.Lock())
        async with lock:
            for known in self._sandboxes.values():
                if known.spec.idempotency_key == spec.idempotency_key and _exists(known):
                    return known.ref
            return await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> SandboxRef:
        await self.start()
        assert self._home is not None
        self._forget_dead()
        if len(self._sandboxes) >= self._config.max_sandboxes:
            raise CapacityExceeded(f"{self._config.max_sandboxes} sandboxes exist: raise max_sandboxes")
        sandbox_id = SandboxId(secrets.token_hex(8))
        home = self._home / _SANDBOXES / sandbox_id
        ref = SandboxRef(provider=self._name, id=sandbox_id, endpoint=str(home), secret=secrets.token_hex(16))
        # A random range of ids: ranges of several providers of a host rarely overlap, those of this provider never do.
        used = {sandbox.slot for sandbox in self._sandboxes.values()}
        while (slot := secrets.randbelow(_ID_RANGES)) in used:
            pass
        sandbox = _Sandbox(spec, ref, slot)
        self._sandboxes[sandbox_id] = sandbox
        try:
            async with asyncio.timeout(self._config.boot_timeout_s):
                await self._boot(sandbox, home)
        except BaseException as error:
            self._discard(sandbox)
            if isinstance(error, TimeoutError):
                raise BootTimeout(f"sandbox not ready after boot_timeout_s={self._config.boot_timeout_s}") from error
            raise
        self._watch_lease(sandbox)
        return ref

    @property
    def _name(self) -> str:
        return f"oci:{self._config.runtime.value}"

    async def _boot(self, sandbox: _Sandbox, home: Path) -> None:
        assert self._keeper is not None
        lowers: list[str] = []
        bash, environment = "/bin/bash", dict[str, str]()
        if sandbox.spec.image != HOST_IMAGE:
            assert self._images is not None
            sandbox.image = await self._images.lease(sandbox.spec.image, patience_s=_IMAGE_PATIENCE_S)
            image = sandbox.image.image
            lowers, environment = [str(path) for path in image.layers], dict(image.environment)
            bash = bash if find(image.layers, bash) is not None else "/usr/bin/bash"
        frozen = []
        for mount in sandbox.spec.mounts:
            known = self._sandboxes.get(mount.source)
            source = Path(known.ref.endpoint) if known is not None else Path("/nonexistent")
            if not SandboxFolder(source).frozen:
                raise SpecRefused(f"mount source {mount.source} is not a frozen sandbox")
            dead = ContainerState.load(source)
            frozen.append({"home": str(source), "base_id": dead.base_id, "lowers": dead.lowers, "path": mount.path})
        state = ContainerState(
            runtime=self._config.runtime.value,
            state_folder=str(home.parent.parent / "state"),
            keeper_pid=self._keeper.pid,
            bash=bash,
            group=f"/oci-headrace-{sandbox.ref.id}",
            base_id=_FIRST_ID + sandbox.slot * IDS_PER_SANDBOX,
            lowers=lowers,
            environment=environment,
            open_files=self._config.open_files,
        )
        config = bundle_config(self._plan(sandbox, home, state))
        await asyncio.to_thread(_write_home, home, sandbox, state, config)
        words = ("run", "--detach", "--bundle", str(home), "--pid-file", str(home / PID_FILE), sandbox.ref.id)
        request = {
            "id": sandbox.ref.id,
            "home": str(home),
            "group": state.group,
            "base_id": state.base_id,
            "disk_bytes": sandbox.spec.disk_bytes or self._config.layer_bytes,
            "lowers": lowers,
            "skeleton": None if lowers else host_skeleton(),
            "frozen": frozen,
            "command": state.oci_runtime().command(*words),
            "delete": state.oci_runtime().command("delete", "--force", sandbox.ref.id),
        }
        await self._keeper.boot(request)

    def _plan(self, sandbox: _Sandbox, home: Path, state: ContainerState) -> BundlePlan:
        spec = sandbox.spec
        return BundlePlan(
            sandbox_id=sandbox.ref.id,
            bash=state.bash,
            base_id=state.base_id,
            limits=Limits(
                cpus=spec.cpu,
                memory_bytes=spec.memory_bytes or self._config.memory_bytes,
                pids=spec.pids or self._config.pids,
                open_files=self._config.open_files,
            ),
            cgroup=state.group,
            machine=os.uname().machine,
            system=tuple(BindMount(path, path) for path in system_folders()) if not state.lowers else (),
            frozen=tuple(
                BindMount(str(home / f"frozen{number}-data"), mount.target) for number, mount in enumerate(spec.mounts)
            ),
        )

    def _watch_lease(self, sandbox: _Sandbox) -> None:
        """End the sandbox when its lease has ended. The deadline is read again each time, because other processes may
        have renewed the lease."""
        try:
            rest_s = SandboxFolder(Path(sandbox.ref.endpoint)).deadline() - time.monotonic()
        except SandboxGone:
            self._discard(sandbox)
            return
        if rest_s <= 0:
            self._discard(sandbox)
        else:
            sandbox.timer = asyncio.get_running_loop().call_later(rest_s, self._watch_lease, sandbox)

    def _discard(self, sandbox: _Sandbox) -> None:
        """Remove a sandbox from the table and have the keeper end it."""
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        if self._sandboxes.pop(sandbox.ref.id, None) is None:
            return
        (Path(sandbox.ref.endpoint) / "secret").unlink(missing_ok=True)
        if self._keeper is not None:
            self._keeper.end(sandbox.ref.id)
        if sandbox.image is not None:
            task = asyncio.get_running_loop().create_task(sandbox.image.release())
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    def _forget_dead(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            if sandbox.timer is not None and not _exists(sandbox):
                self._discard(sandbox)

    async def attach(self, ref: SandboxRef) -> OciSandbox:
        return OciSandbox(ref)

    async def destroy(self, sandbox: SandboxId) -> None:
        known = self._sandboxes.get(sandbox)
        if known is not None:
            await OciSandbox(known.ref).kill()

    async def list(self) -> list[SandboxInfo]:
        self._forget_dead()
        infos = []
        for sandbox in self._sandboxes.values():
            home = Path(sandbox.ref.endpoint)
            frozen = SandboxFolder(home).frozen
            with suppress(SandboxGone):
                infos.append(
                    SandboxInfo(
                        id=sandbox.ref.id,
                        state="frozen" if frozen else "paused" if (home / PAUSED_MARK).exists() else "running",
                        expires_in_s=max(0.0, SandboxFolder(home).deadline() - time.monotonic()),
                        labels=dict(sandbox.spec.labels),
                        idempotency_key=sandbox.spec.idempotency_key,
                    )
                )
        return infos

    async def aclose(self) -> None:
        """End every sandbox and the keeper. Idempotent."""
        if self._images is not None:
            await self._images.aclose()
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            self._discard(sandbox)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()
        if self._releasing:
            await asyncio.wait(self._releasing)
        home, self._home = self._home, None
        if home is not None:
            await _remove_home(home)


async def _remove_home(home: Path) -> None:
    """Remove a provider's folder, along with containers and control groups that its keeper could not remove."""
    for sandbox in (home / _SANDBOXES).glob("*"):
        with suppress(OSError, ValueError, TypeError):
            state = ContainerState.load(sandbox)
            runtime = state.oci_runtime()
            await runtime.call("resume", sandbox.name)
            await runtime.call("delete", "--force", sandbox.name)
            oci_cgroups.remove(state.group)
    await asyncio.to_thread(remove, home)


def _exists(sandbox: _Sandbox) -> bool:
    return (Path(sandbox.ref.endpoint) / "secret").exists()


def _make_home(parent: Path) -> Path:
    """Create the folder `<owner>`, which other users can search but not read."""
    make_missing(parent, _PASSABLE)
    status = parent.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise FolderRefused(f"{parent} must belong to this user with mode 711: remove it or set runtime_folder")
    for folder in (parent, *parent.resolve().parents):
        if not folder.stat().st_mode & 0o001:
            raise SpecRefused(
                f"{folder} is not searchable by other users (chmod o+x), so no container can use {parent}"
            )
    home = parent / new_owner()
    for folder in (home, home / _SANDBOXES):
        make_missing(folder, _PASSABLE)
    make_missing(home / "state")
    return home


def _write_home(home: Path, sandbox: _Sandbox, state: ContainerState, config: dict[str, Any]) -> None:
    make_missing(home, _PASSABLE)
    for name, text in (
        ("secret", sandbox.ref.secret),
        (STATE_FILE, json.dumps(state._asdict())),
        ("config.json", json.dumps(config)),
    ):
        with open(home / name, "x", encoding="utf-8", opener=open_private) as file:
            file.write(text)
    SandboxFolder(home).set_deadline(time.monotonic() + sandbox.spec.ttl_s)
