"""What a sandbox without the optional features answers: providers that lack some inherit the refusals from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from headrace.sandboxes.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from headrace.sandboxes.base import HostPort, ImageRef, Process, SandboxSpec, SandboxUsage, TerminalSize


def refuse_folders(spec: SandboxSpec, provider: str) -> None:
    """What a provider without Feature.FOLDERS says of a spec that has some. Raises Unsupported."""
    if spec.folders:
        targets = ", ".join(folder.target for folder in spec.folders)
        raise Unsupported(f"folders ({targets}): the {provider} provider shows none of its host; put them in the image")


class PartialSandbox:
    """Every optional method of `Sandbox` raises Unsupported; subclasses override what they have."""

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
        self._refuse("spawn a command that is not waited for")

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
        self._refuse("usage")

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} cannot {what}: use a provider that can (docs/sandboxes.md)")
