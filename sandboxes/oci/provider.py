"""Sandboxes by an OCI runtime, runc or runsc (gVisor), without a daemon: the provider that boots them.

Invariants:
- One keeper process per provider is the parent of all its containers and holds their file layers; when the provider or
  the keeper dies, so do they. What both left on disk and in cgroups is removed by the next provider that starts.
- A sandbox is known by its folder: its secret, its lease and its state lie there, for whoever attaches.
- Each has an id range, a cgroup and a network of its own; the image below it is shared, read-only, and leased.
- A create that fails or is cancelled leaves nothing.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.sandboxes.base import Feature, Network, SandboxId, SandboxInfo, SandboxRef, SandboxSpec, refuse_folders
from headrace.sandboxes.errors import (
    BootTimeout,
    CapacityExceeded,
    FolderRefused,
    SandboxGone,
    SpecRefused,
)
from headrace.sandboxes.images.folders import Owner, is_alive, new_owner, remove
from headrace.sandboxes.images.merged_tree import find
from headrace.sandboxes.images.store import ImageStore
from headrace.sandboxes.kernel import rootfs
from headrace.sandboxes.kernel.id_blocks import IDS_PER_SANDBOX
from headrace.sandboxes.oci import cgroups as oci_cgroups
from headrace.sandboxes.oci.bundle import BindMount, BundlePlan, Limits, bundle_config
from headrace.sandboxes.oci.host_skeleton import HOST_IMAGE, host_skeleton, system_folders
from headrace.sandboxes.oci.keeper import PID_FILE
from headrace.sandboxes.oci.keeper_client import KeeperClient
from headrace.sandboxes.oci.runtime import OciRuntime, RuntimeKind
from headrace.sandboxes.oci.sandbox import PAUSED_MARK, STATE_FILE, OciSandbox, SandboxState, open_private
from headrace.sandboxes.private_folders import make_missing, user_folder
from headrace.sandboxes.unprotected.sandbox_folder import SandboxFolder

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.sandboxes.images.store import ImageLease

_FIRST_ID: Final = 0x60000000
_IMAGE_PATIENCE_S: Final = 10.0
"""A create waits so long for an image that is being unpacked; then its caller waits, and asks again."""
_ID_RANGES: Final = 30_000
_SANDBOXES: Final = "sandboxes"
_PASSABLE: Final = 0o711
"""Others pass through but do not list: the root of a container is another user's."""
_FEATURES: Final = {
    RuntimeKind.RUNC: frozenset({Feature.FREEZE, Feature.PAUSE, Feature.SPAWN, Feature.USAGE}),
    # A paused gVisor still runs new commands, and its processes are none of this kernel's.
    RuntimeKind.RUNSC: frozenset({Feature.FREEZE}),
}


class OciSandboxConfig(BaseModel):
    """Limits of one provider and of each of its sandboxes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: RuntimeKind = RuntimeKind.RUNC
    """Which program runs the containers; it must be installed."""
    max_sandboxes: int = Field(default=256, ge=1, le=10_000)
    """Live and frozen sandboxes at once; above it create raises CapacityExceeded."""
    layer_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of a sandbox's file layer in memory, where its spec names no `disk_bytes`; what exceeds it gets ENOSPC. It
    counts as memory of the sandbox."""
    pids: int = Field(default=512, ge=8)
    """Processes in a sandbox, where its spec names no `pids`."""
    open_files: int = Field(default=4096, ge=64)
    """Descriptors of one process in a sandbox; no more than this process may have itself."""
    boot_timeout_s: float = Field(default=60.0, gt=0)
    """A sandbox that is not ready by then is killed: BootTimeout."""
    image_folder: Path | None = None
    """Where images are unpacked; by default below the system's folder for temporary files. Several providers may share
    it."""
    image_bytes: int = Field(default=50 << 30, ge=1 << 20)
    """What unpacked images may take there; those used last stay."""
    runtime_folder: Path | None = None
    """Where folders of sandboxes are made; by default below the system's folder for temporary files. Others must be
    able to pass through every folder above it: the root of a container is another user's."""


@dataclass(slots=True)
class _Sandbox:
    spec: SandboxSpec
    ref: SandboxRef
    slot: int
    image: ImageLease | None = None
    timer: asyncio.TimerHandle | None = None


class _Root(NamedTuple):
    """What a sandbox's file tree is made of."""

    lowers: list[str]
    bash: str
    environment: dict[str, str]


class OciProvider:
    """Boots containers. An async context manager; `aclose` ends every sandbox."""

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Raises NamespacesUnavailable (no such runtime here), BootFailed, FolderRefused."""
        async with self._starting:
            if self._keeper is not None and self._keeper.alive:
                return
            await self._end()
            self._runtime(Path("/nonexistent"))
            parent = self._config.runtime_folder or user_folder("oci", _PASSABLE)
            await _sweep(parent)
            self._home = await asyncio.to_thread(_make_home, parent)
            if self._images is None:
                images = self._config.image_folder or user_folder("images")
                self._images = ImageStore(images, self._config.image_bytes)
            self._keeper = await KeeperClient.start()

    def _runtime(self, home: Path) -> OciRuntime:
        return OciRuntime(self._config.runtime, home / "state")

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        """Boot a sandbox, or return the one with the same idempotency key.

        Raises ImageUnknown, ImageRefused, OutOfDisk, SpecRefused, FrozenPathRefused, CapacityExceeded, BootFailed,
        BootTimeout, LauncherGone.
        """
        _check_spec(spec)
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
            raise CapacityExceeded(f"{self._config.max_sandboxes} sandboxes are there: raise max_sandboxes")
        sandbox_id = SandboxId(secrets.token_hex(8))
        home = self._home / _SANDBOXES / sandbox_id
        ref = SandboxRef(provider=self._name, id=sandbox_id, endpoint=str(home), secret=secrets.token_hex(16))
        sandbox = _Sandbox(spec, ref, self._free_slot())
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

    def _free_slot(self) -> int:
        """A random range of ids: several providers of a host rarely share one, those of this provider never do."""
        used = {sandbox.slot for sandbox in self._sandboxes.values()}
        while (slot := secrets.randbelow(_ID_RANGES)) in used:
            pass
        return slot

    async def _boot(self, sandbox: _Sandbox, home: Path) -> None:
        assert self._keeper is not None
        root = await self._root(sandbox)
        frozen = [self._frozen(mount.source, mount.path) for mount in sandbox.spec.mounts]
        state = SandboxState(
            runtime=self._config.runtime.value,
            state_folder=str(home.parent.parent / "state"),
            keeper_pid=self._keeper.pid,
            bash=root.bash,
            group=f"/oci-headrace-{sandbox.ref.id}",
            base_id=_FIRST_ID + sandbox.slot * IDS_PER_SANDBOX,
            lowers=root.lowers,
            environment=root.environment,
            open_files=self._config.open_files,
        )
        config = bundle_config(self._plan(sandbox, home, state))
        await asyncio.to_thread(_write_home, home, sandbox, state, config)
        await self._keeper.boot(self._request(sandbox, home, state, frozen))

    async def _root(self, sandbox: _Sandbox) -> _Root:
        if sandbox.spec.image == HOST_IMAGE:
            return _Root([], "/bin/bash", {})
        assert self._images is not None
        sandbox.image = await self._images.lease(sandbox.spec.image, patience_s=_IMAGE_PATIENCE_S)
        image = sandbox.image.image
        bash = "/bin/bash" if find(image.layers, "/bin/bash") is not None else "/usr/bin/bash"
        return _Root([str(path) for path in image.layers], bash, dict(image.environment))

    def _frozen(self, source: SandboxId, path: str) -> dict[str, Any]:
        known = self._sandboxes.get(source)
        home = Path(known.ref.endpoint) if known is not None else Path("/nonexistent")
        if not SandboxFolder(home).frozen:
            raise SpecRefused(f"mount source {source} is not a frozen sandbox")
        state = SandboxState(**json.loads((home / STATE_FILE).read_bytes()))
        return {"home": str(home), "base_id": state.base_id, "lowers": state.lowers, "path": path}

    def _plan(self, sandbox: _Sandbox, home: Path, state: SandboxState) -> BundlePlan:
        spec = sandbox.spec
        return BundlePlan(
            sandbox_id=sandbox.ref.id,
            bash=state.bash,
            base_id=state.base_id,
            limits=Limits(
                cpus=spec.cpu,
                memory_bytes=spec.memory_bytes,
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

    def _request(
        self, sandbox: _Sandbox, home: Path, state: SandboxState, frozen: list[dict[str, Any]]
    ) -> dict[str, Any]:
        runtime = self._runtime(home.parent.parent)
        words = ("run", "--detach", "--bundle", str(home), "--pid-file", str(home / PID_FILE), sandbox.ref.id)
        return {
            "id": sandbox.ref.id,
            "home": str(home),
            "group": state.group,
            "base_id": state.base_id,
            "disk_bytes": sandbox.spec.disk_bytes or self._config.layer_bytes,
            "lowers": state.lowers,
            "skeleton": None if state.lowers else host_skeleton(),
            "frozen": frozen,
            "command": runtime.command(*words),
            "delete": runtime.command("delete", "--force", sandbox.ref.id),
        }

    def _watch_lease(self, sandbox: _Sandbox) -> None:
        """Look again when the lease would end; renewals by other processes moved its file's deadline."""
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
        """End and forget a sandbox; its keeper does the work."""
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
            with suppress(SandboxGone):
                infos.append(
                    SandboxInfo(
                        id=sandbox.ref.id,
                        state=_state_word(home),
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
    """The folder of a provider, with whatever its keeper did not come to remove: containers, control groups."""
    for sandbox in (home / _SANDBOXES).glob("*"):
        with suppress(OSError, ValueError, TypeError):
            state = SandboxState(**json.loads((sandbox / STATE_FILE).read_bytes()))
            runtime = OciRuntime(RuntimeKind(state.runtime), Path(state.state_folder))
            await runtime.call("resume", sandbox.name)
            await runtime.call("delete", "--force", sandbox.name)
            oci_cgroups.remove(state.group)
    await asyncio.to_thread(remove, home)


def _check_spec(spec: SandboxSpec) -> None:
    if spec.network is not Network.NONE:
        raise SpecRefused(f"network {spec.network.value!r}: the oci provider has only `none`")
    refuse_folders(spec, "oci")
    for name in ("cpu", "memory_bytes", "disk_bytes", "pids", "ttl_s"):
        value = getattr(spec, name)
        if value is not None and not value > 0:
            raise SpecRefused(f"{name}={value}: must be more than 0")
    for mount in spec.mounts:
        try:
            rootfs.check_target(mount.target)
        except rootfs.MountRefused as error:
            raise SpecRefused(str(error)) from error


def _exists(sandbox: _Sandbox) -> bool:
    return (Path(sandbox.ref.endpoint) / "secret").exists()


def _state_word(home: Path) -> str:
    if SandboxFolder(home).frozen:
        return "frozen"
    return "paused" if (home / PAUSED_MARK).exists() else "running"


async def _sweep(parent: Path) -> None:
    """Remove what providers left that died together with their keepers."""
    homes = await asyncio.to_thread(lambda: list(parent.iterdir()) if parent.is_dir() else [])
    for home in homes:
        if not is_alive(Owner(home.name)):
            await _remove_home(home)


def _make_home(parent: Path) -> Path:
    """A folder `<owner>` that others may pass through but not list: the root of a container is another user's."""
    make_missing(parent, _PASSABLE)
    status = parent.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise FolderRefused(f"{parent} must belong to this user with mode 711: remove it or set runtime_folder")
    for folder in (parent, *parent.resolve().parents):
        if not folder.stat().st_mode & 0o001:
            raise SpecRefused(f"{folder} lets nobody else pass (chmod o+x), so no container can use {parent}")
    home = parent / new_owner()
    for folder in (home, home / _SANDBOXES):
        make_missing(folder, _PASSABLE)
    make_missing(home / "state")
    return home


def _write_home(home: Path, sandbox: _Sandbox, state: SandboxState, config: dict[str, Any]) -> None:
    make_missing(home, _PASSABLE)
    for name, text in (
        ("secret", sandbox.ref.secret),
        (STATE_FILE, json.dumps(state._asdict())),
        ("config.json", json.dumps(config)),
    ):
        with open(home / name, "x", encoding="utf-8", opener=open_private) as file:
            file.write(text)
    SandboxFolder(home).set_deadline(time.monotonic() + sandbox.spec.ttl_s)
