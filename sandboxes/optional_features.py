"""Refusals of optional features, for providers that lack some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from headrace.sandboxes.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from headrace.sandboxes.base import HostPort, ImageRef, Process, SandboxSpec, SandboxUsage, TerminalSize


def refuse_folders(spec: SandboxSpec, provider: str) -> None:
    """Refuse a spec with folders for a provider without Feature.FOLDERS. Raises Unsupported."""
    if spec.folders:
        targets = ", ".join(folder.target for folder in spec.folders)
        raise Unsupported(
            f"folders ({targets}): the {provider} provider cannot show host folders; add them to the image"
        )


class PartialSandbox:
    """Sandbox whose optional methods all raise Unsupported; subclasses override the supported ones."""

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
        timeout_s: float | None = None,
    ) -> Process:
        self._refuse("spawn commands")

    async def freeze(self) -> None:
        self._refuse("freeze")

    async def pause(self) -> None:
        self._refuse("pause")

    async def resume(self) -> None:
        self._refuse("resume")

    async def snapshot(self) -> ImageRef:
        self._refuse("snapshot")

    def expose(self, port: int, target: HostPort, prefix: str) -> AbstractAsyncContextManager[None]:
        self._refuse(f"expose port {port} for {target.host}:{target.port}{prefix}")

    async def usage(self) -> SandboxUsage:
        self._refuse("report usage")

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} cannot {what}: use a provider that can (README, Sandboxes)")
