"""A provider of another package: local sandboxes, of which an image may have a program that starts it."""

from __future__ import annotations

from pathlib import Path

from headrace.sandboxes.base import Sandbox, SandboxId, SandboxInfo, SandboxRef, SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

START = "/start"
"""Program of an image; a sandbox is ready when it has ended."""


class Starting:
    """Boots local sandboxes and starts them."""

    def __init__(self, *, image_folder: str | None = None) -> None:
        folder = None if image_folder is None else Path(image_folder)
        self._local = LocalProvider(LocalSandboxConfig(image_folder=folder))
        self.features = self._local.features

    async def start(self) -> None:
        await self._local.start()

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        ref = await self._local.create(spec)
        try:
            await (await self._local.attach(ref)).exec(f"[ ! -x {START} ] || {START}", timeout_s=60)
        except BaseException:
            await self._local.destroy(ref.id)
            raise
        return ref

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._local.attach(ref)

    async def list(self) -> list[SandboxInfo]:
        return await self._local.list()

    async def destroy(self, sandbox: SandboxId) -> None:
        await self._local.destroy(sandbox)

    async def aclose(self) -> None:
        await self._local.aclose()
